"""`make docs` builds the guides as a site that needs no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the recipe of `make docs`; a dead link ends the command.

    Not with --quiet, which keeps warnings from being counted.
    """
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\ndocs:")[1].split("\n\n")[0].replace("\\\n", " ")
    copy = next(line for line in recipe.splitlines() if line.strip().startswith("cp "))
    (folder / "runs" / "pages").mkdir(parents=True)
    config = (ROOT / "eval" / "docs" / "mkdocs.yml").read_text().replace("../../", "")
    (folder / "mkdocs.yml").write_text(config)
    subprocess.run(
        copy.replace(" runs/pages", f" {folder}/runs/pages"), cwd=ROOT, shell=True, check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "site"


class Loads(HTMLParser):
    """Collects what a browser fetches for a page by itself; links that a reader may follow do not
    count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if tag != "a" and name in ("src", "href", "srcset", "data") and value:
                self.found.append(value)


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        fetched = [target for target in loads.found if not target.startswith(("#", "data:"))]
        assert fetched
        assert not [target for target in fetched if re.match(r"(\w+:)?//", target)], page
        if page.name != "404.html":  # whose addresses are those of a server
            assert all((page.parent / target.split("?")[0]).exists() for target in fetched), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text()), sheet


def test_site_has_every_page_of_the_repository(site: Path) -> None:
    tops = ("eval", "patches", "sglang_c2t")
    pages = [*ROOT.glob("*.md"), *(page for top in tops for page in (ROOT / top).rglob("*.md"))]
    for page in pages:
        where = page.relative_to(ROOT)
        name = "index.html" if where.name == "README.md" else f"{where.stem}.html"
        assert (site / where.parent / name).is_file(), page

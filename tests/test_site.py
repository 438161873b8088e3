"""The guides as a site: built as ``make docs`` builds it, complete, and without any other host."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.docs import hooks

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a link or an anchor that leads nowhere would have ended the command (not with
    --quiet, which keeps the warnings from being counted).
    """
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict",
         "-f", "eval/docs/mkdocs.yml", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


class Loads(HTMLParser):
    """What a browser would fetch for a page by itself; links that a reader may follow are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if tag != "a" and name in ("src", "href", "srcset", "data") and value:
                self.found.append(value)


def test_a_page_is_made_of_what_lies_beside_it(site: Path) -> None:
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


def test_every_page_of_the_repository_is_there(site: Path) -> None:
    for page in hooks.pages():
        where = Path(page)
        name = "index.html" if where.name == "README.md" else f"{where.stem}.html"
        assert (site / where.parent / name).is_file(), page


def test_the_benchmark_s_page_shows_the_table_of_the_results(site: Path) -> None:
    page = (site / "eval" / "benchmark.html").read_text()
    assert "<svg role=" in page
    results = (ROOT / "eval" / "RESULTS.md").read_text()
    ours = re.search(r"^\| `auto` \|(.*) \|$", results, re.MULTILINE)
    assert ours is not None
    for entry in ours[1].split("|"):
        assert f">{entry.strip()}</td>" in page

"""What the site is made of: pages and the files that they link to, taken from where they lie.

MkDocs calls these functions by their names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from eval.docs.benchmark import benchmark

ROOT = Path(__file__).parents[2]
#: Pages that the navigation leaves out are none of the site.
ELSEWHERE = {"sglang_c2t/guides/package.md"}


def pages() -> set[str]:
    """Every Markdown page of the repository, from its root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "patches").glob("*.md"), *(ROOT / "eval").glob("*.md"),
             *(ROOT / "eval" / "gpu").glob("*.md"), *(ROOT / "eval" / "demo_models").glob("*.md"),
             *(ROOT / "sglang_c2t" / "guides").rglob("*.md")]  # fmt: skip
    return {path.relative_to(ROOT).as_posix() for path in found} - ELSEWHERE


def linked(page: str) -> set[str]:
    """Files of the repository that a page links to, or shows."""
    targets = re.findall(r"\]\(([^)\s#]+)", (ROOT / page).read_text(encoding="utf-8"))
    files = {
        os.path.normpath(Path(page).parent / target) for target in targets if "://" not in target
    }
    return {file for file in files if (ROOT / file).is_file()}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The pages, what they link to, and the one page that is made of the results."""
    shown = pages()
    for uri in sorted(shown.union(*map(linked, shown)) - ELSEWHERE):
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))
    results = (ROOT / "eval" / "RESULTS.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "eval/benchmark.md", content=benchmark(results)))
    return files

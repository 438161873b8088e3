"""No folder grows unnoticed: each has a budget of lines. Raising one is a commit of its own, with
its reason; a change that makes a folder smaller lowers its budget.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

#: Lines of Python by folder, folders below it that have a budget of their own not counted.
LINES = {
    "eval": 1160,
    "eval/baselines": 700,
    "eval/bench": 1870,
    "eval/demo_models": 1110,
    "eval/gpu": 1700,
    "eval/lossless": 1270,
    "eval/report": 1150,
    "eval/smollm2": 1030,
    "eval/soak": 960,
    "eval/tables": 750,
    "sglang_c2t": 1360,
    "sglang_c2t/classifier": 1000,
    "sglang_c2t/cpu": 910,
    "sglang_c2t/draft": 1190,
    "sglang_c2t/guides": 80,
    "sglang_c2t/kernels": 2660,
    "sglang_c2t/offline": 3430,
    "sglang_c2t/plan": 2810,
    "sglang_c2t/policies": 1060,
    "sglang_c2t/srt": 2210,
    "sglang_c2t/srt/cpu": 640,
    "sglang_c2t/srt/draft": 2010,
    "sglang_c2t/srt/hooks": 2020,
    "sglang_c2t/srt/verify": 2520,
    "patches": 120,
    "tests": 3110,
    "tests/classifier": 660,
    "tests/cpu": 600,
    "tests/cuda": 180,
    "tests/draft": 1710,
    "tests/e2e": 4880,
    "tests/emulated": 4720,
    "tests/eval": 5490,
    "tests/kernels": 1990,
    "tests/offline": 1930,
    "tests/patches": 510,
    "tests/plan": 1610,
    "tests/policies": 680,
    "tests/srt": 7750,
}

#: Words of Markdown by folder.
WORDS = {".": 3_200, "eval": 10_230, "patches": 700, "sglang_c2t": 10_200, "tests": 0}


def budget_of(path: Path, budgets: dict[str, int]) -> str:
    """The nearest folder above ``path`` that has a budget."""
    folders = (str(folder) for folder in path.relative_to(REPOSITORY).parents)
    return next(folder for folder in folders if folder in budgets or folder == ".")


@pytest.mark.parametrize(
    ("suffix", "budgets"), [(".py", LINES), (".md", WORDS)], ids=["lines of Python", "words"]
)
def test_folder_keeps_its_budget(suffix: str, budgets: dict[str, int]) -> None:
    found: dict[str, int] = {}
    tops = [REPOSITORY / top for top in ("eval", "patches", "sglang_c2t", "tests")]
    for path in [*REPOSITORY.glob("*"), *(file for top in tops for file in top.rglob("*"))]:
        if path.suffix == suffix:
            text, folder = path.read_text(encoding="utf-8"), budget_of(path, budgets)
            size = len(text.split() if suffix == ".md" else text.splitlines())
            found[folder] = found.get(folder, 0) + size
    over = {
        folder: f"{size:,} of {budgets.get(folder, 0):,}"
        for folder, size in found.items()
        if size > budgets.get(folder, 0)
    }
    assert not over, "write less, or raise the budget in a commit of its own that says why"


#: Words of the pages that people read from start to end.
PAGES = {"README.md": 900, "sglang_c2t/guides/production.md": 2_500}
PAGE = 1_500


def test_pages_keep_their_budget() -> None:
    guides = (REPOSITORY / "sglang_c2t" / "guides").rglob("*.md")
    for path in (REPOSITORY / "README.md", *guides):
        page = path.relative_to(REPOSITORY).as_posix()
        assert len(path.read_text(encoding="utf-8").split()) <= PAGES.get(page, PAGE), page


#: Lines of a function, but for kernels, whose steps share registers.
FUNCTION = 60


def test_no_function_is_too_long() -> None:
    too_long = {}
    for path in (REPOSITORY / "sglang_c2t").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION and path.parent.name != "kernels":
                    too_long[f"{path.name}: {node.name}"] = length
    assert not too_long

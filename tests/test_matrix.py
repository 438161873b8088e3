"""The matrix of what is served names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "sglang_c2t" / "guides" / "matrix.md").read_text(encoding="utf-8")
SHOWN, NEVER_RUN = PAGE.split("## Read in the code, never run")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda name: name)
def test_matrix_names_tests_that_exist(file: str, test: str) -> None:
    code = ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
    assert test in {node.name for node in code if isinstance(node, ast.FunctionDef)}


def test_matrix_rows_name_their_tests_unless_they_never_ran() -> None:
    rows = re.findall(r"^\| .*(?:packed|static)\*\*.*$", SHOWN, re.MULTILINE)
    assert len(rows) > 20
    assert all("::test_" in row for row in rows)
    assert "::test_" not in NEVER_RUN

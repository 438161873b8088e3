"""Docstrings, comments and Markdown keep to a list of words that are banned.

The list bans words that readers had to read twice. String literals are data and do not count.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BANNED = re.compile(
    r"\b(nobody|somebody|told|tells|alike|young|settle[sd]?|outlook|rehears\w+|undergo\w*"
    r"|witness\w*|ordeals?|pace)\b",
    re.IGNORECASE,
)
#: A docstring starts with what the code returns or does.
BANNED_STARTS = re.compile(r"(Of|What|Who|Whose|Behind|Beside)\b")
#: Names, SGLang's among them: code in backquotes, fenced blocks, addresses, flags.
ALLOWED = re.compile(r"^```.*?^```|`[^`\n]*`|https?://\S+|--\w\S*", re.MULTILINE | re.DOTALL)

#: Violations left in Python by folder. Lower a number when you remove some; never raise one.
LEFT = {"eval": 0, "patches": 0, "sglang_c2t": 0, "tests": 0}

PAGES = [*ROOT.glob("*.md"), *(page for top in LEFT for page in (ROOT / top).rglob("*.md"))]


def docstrings(code: str) -> Iterator[str]:
    """Yield every string that stands as a statement: docstrings, those of attributes too."""
    for node in ast.walk(ast.parse(code)):
        constant = node.value if isinstance(node, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield constant.value


def violations(code: str) -> list[str]:
    """List the banned words of docstrings and comments, and the banned starts of docstrings."""
    texts = list(docstrings(code))
    starts = [found[1] for text in texts if (found := BANNED_STARTS.match(text.lstrip()))]
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            texts.append(token.string)
    return starts + [word for text in texts for word in BANNED.findall(ALLOWED.sub("", text))]


@pytest.mark.parametrize("folder", LEFT)
def test_banned_words_in_docstrings_and_comments_only_become_fewer(folder: str) -> None:
    found = {
        path.relative_to(ROOT).as_posix(): words
        for path in (ROOT / folder).rglob("*.py")
        if (words := violations(path.read_text(encoding="utf-8")))
    }
    count = sum(map(len, found.values()))
    assert count <= LEFT[folder], f"{count} banned words, {LEFT[folder]} were left: {found}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_markdown_has_no_banned_word(page: Path) -> None:
    assert BANNED.findall(ALLOWED.sub("", page.read_text(encoding="utf-8"))) == []


def test_violations_are_found_in_docstrings_and_comments_but_not_in_data() -> None:
    code = '"""Of B, one."""\nx = "nobody"  # nobody calls `told`\n'
    assert violations(code) == ["Of", "nobody"]

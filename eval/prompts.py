"""Which prompts a run of the demo models is measured on, and which ones a classifier learns from.

Our own generators write most, with seeds that the models were never trained on; public sets come
from folders the caller names, one JSON object a line with ``turns``. Knows nothing of torch or
servers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval.demo_models.corpus import FAMILIES, generate


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


#: Longer prompts are skipped: they would not fit the demo models' 2,048 positions.
MAX_CHARS = 4000


def public_mix(
    folder: Path, sets: dict[str, tuple[str, Callable[[str], str]]], n: int
) -> list[Prompt]:
    """The first `n` fitting prompts of each set in `folder`; ValueError for a missing file."""
    prompts = []
    for family, (name, shape) in sets.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} must hold {name}, the prompts of {family}.")
        with path.open(encoding="utf-8") as lines:
            texts = (shape(json.loads(line)["turns"][0]) for line in lines)
            fitting = (text for text in texts if len(text) <= MAX_CHARS)
            prompts += [Prompt(family, text) for text in itertools.islice(fitting, n)]
    return prompts

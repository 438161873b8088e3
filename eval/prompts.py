"""Which prompts a run of the demo models is measured on, and which ones a classifier learns from.

All text comes from our own generators, with seeds that the models were never trained on. Knows
nothing of torch, servers or datasets on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

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

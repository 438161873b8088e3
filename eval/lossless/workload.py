"""Greedy requests as different from one another as users' are, for any model.

Prompts travel as token ids, so that a divergence has a context that can be scored again.
Knows nothing of servers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

LONGEST_ANSWER = 96  # tokens
LONG_PROMPT = 1000  # tokens: several chunks of prefill

STOPS = ("\n", ". ", "the", " and", "=", "):", "a", " in", "1", "0")
REGEXES = (
    "(yes|no|maybe)( and (yes|no|maybe)){2,5}",
    "[a-c]{3,12}",
    "[0-9]{2}(-[0-9]{4}){1,3}",
    "(red|green|blue)(, (red|green|blue)){0,6}[.]",
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["small", "large"]},
        },
        "required": ["n", "kind"],
    }
)

#: One round of requests: every sort, the ordinary ones most often.
SORTS = (
    "ordinary", "ordinary", "short", "stop string", "ordinary", "one-token prompt", "past the end",
    "ordinary", "long prompt", "shared prefix", "ordinary", "regex", "ordinary", "stop token",
    "ordinary", "opted out", "JSON schema",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """One request: ``body`` goes to /generate."""

    index: int
    sort: str
    body: dict[str, Any]

    @property
    def prompt_ids(self) -> list[int]:
        """Its prompt."""
        ids: list[int] = self.body["input_ids"]
        return ids

    @property
    def constrained(self) -> bool:
        """Whether a grammar forbids tokens."""
        return not {"regex", "json_schema"}.isdisjoint(self.body["sampling_params"])


def mixed(
    prompts: Sequence[Sequence[int]], n: int, seed: int = 0, longest: int = LONGEST_ANSWER
) -> list[Asked]:
    """``n`` greedy requests over ``prompts`` (token ids), in an order in which sorts alternate.

    Answers have at most ``longest`` tokens.
    """
    rng = random.Random(seed)
    sorts = cycle(SORTS)
    return [_asked(i, next(sorts), prompts, rng, longest) for i in range(n)]


def _asked(
    index: int, sort: str, prompts: Sequence[Sequence[int]], rng: random.Random, longest: int
) -> Asked:
    ids = list(prompts[index % len(prompts)])
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": rng.randint(1, longest)}
    if sort == "short":
        params["max_new_tokens"] = rng.randint(1, 3)
    elif sort == "stop string":
        # Of several stops within the tokens of one verification, SGLang takes the one listed
        # first, and a string before an end token, not the one that comes first; with and
        # without C2T. One stop is what a server with speculation and one without agree on.
        params.update(stop=[rng.choice(STOPS)], ignore_eos=True)
    elif sort == "stop token":
        params["stop_token_ids"] = sorted(rng.sample(ids, min(3, len(ids))))
    elif sort == "one-token prompt":
        ids = [rng.choice(ids)]
    elif sort == "past the end":
        params.update(ignore_eos=True, max_new_tokens=longest)
    elif sort == "long prompt":
        length = rng.randint(LONG_PROMPT // 2, LONG_PROMPT)
        ids = joined(prompts, index, length)
    elif sort == "shared prefix":  # of the prompt before, which may still be running
        before = prompts[(index - 1) % len(prompts)]
        ids = [*before[: len(before) // 2], *ids]
    elif sort == "regex":
        params["regex"] = rng.choice(REGEXES)
    elif sort == "JSON schema":
        params["json_schema"] = SCHEMA
    elif sort == "opted out":  # of gating; SGLang itself ignores parameters it does not know
        params["custom_params"] = {"c2t": False}
    return Asked(index, sort, {"input_ids": ids, "sampling_params": params})


def joined(prompts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """The last ``length`` tokens of as many prompts as that takes, from ``first`` on."""
    ids: list[int] = []
    number = first
    while len(ids) < length:
        ids = [*prompts[number % len(prompts)], *ids]
        number += 1
    return ids[-length:]

"""Greedy requests of many kinds, for any model.

Prompts are token ids, so that the context of a divergence can be scored again.
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
_PROPERTIES = {
    "n": {"type": "integer", "minimum": 0, "maximum": 99},
    "kind": {"enum": ["small", "large"]},
}
SCHEMA = json.dumps({"type": "object", "properties": _PROPERTIES, "required": [*_PROPERTIES]})

#: One round of requests: every kind, the ordinary ones most often.
KINDS = (
    "ordinary", "ordinary", "short", "stop string", "ordinary", "one-token prompt", "past the end",
    "ordinary", "long prompt", "shared prefix", "ordinary", "regex", "ordinary", "stop token",
    "ordinary", "opted out", "JSON schema",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One request; ``body`` goes to /generate."""

    index: int
    kind: str
    body: dict[str, Any]

    @property
    def constrained(self) -> bool:
        """Whether a grammar forbids tokens."""
        return not {"regex", "json_schema"}.isdisjoint(self.body["sampling_params"])


def mixed(
    prompts: Sequence[Sequence[int]], n: int, seed: int = 0, longest: int = LONGEST_ANSWER
) -> list[Request]:
    """``n`` greedy requests over ``prompts`` (token ids), their kinds alternating.

    Answers have at most ``longest`` tokens.
    """
    rng = random.Random(seed)
    return [
        _request(i, kind, prompts, rng, longest)
        for i, kind in zip(range(n), cycle(KINDS), strict=False)
    ]


def _request(
    index: int, kind: str, prompts: Sequence[Sequence[int]], rng: random.Random, longest: int
) -> Request:
    ids = list(prompts[index % len(prompts)])
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": rng.randint(1, longest)}
    if kind == "short":
        params["max_new_tokens"] = rng.randint(1, 3)
    elif kind == "stop string":
        # Among several stops in one verification SGLang takes the first listed, and a string before
        # an end token; without speculation the earliest. They agree on one stop string.
        params.update(stop=[rng.choice(STOPS)], ignore_eos=True)
    elif kind == "stop token":
        params["stop_token_ids"] = sorted(rng.sample(ids, min(3, len(ids))))
    elif kind == "one-token prompt":
        ids = [rng.choice(ids)]
    elif kind == "past the end":
        params.update(ignore_eos=True, max_new_tokens=longest)
    elif kind == "long prompt":
        length, ids, at = rng.randint(LONG_PROMPT // 2, LONG_PROMPT), [], index
        while len(ids) < length:
            ids = [*prompts[at % len(prompts)], *ids]
            at += 1
        ids = ids[-length:]
    elif kind == "shared prefix":  # of the previous prompt, which may still be running
        previous = prompts[(index - 1) % len(prompts)]
        ids = [*previous[: len(previous) // 2], *ids]
    elif kind == "regex":
        params["regex"] = rng.choice(REGEXES)
    elif kind == "JSON schema":
        params["json_schema"] = SCHEMA
    elif kind == "opted out":  # of gating; SGLang ignores parameters that it does not know
        params["custom_params"] = {"c2t": False}
    return Request(index, kind, {"input_ids": ids, "sampling_params": params})

"""Mutants of valid requests, by the fields that SGLang's and our endpoints read.

A mutant may be harmless: it must be served or refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.soak.malformed import CHAT, COMPLETIONS, Malformed

SAMPLING = "/generate sampling_params"
#: A valid body of each endpoint, JSON texts of odd values, and odd headers.
_MUTANTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VALID: dict[str, dict[str, Any]] = _MUTANTS["valid"]
ODD = [*_MUTANTS["odd"], *(a + text * times + b for a, text, times, b in _MUTANTS["repeated"])]
HEADERS = [*map(tuple, _MUTANTS["headers"]), ("Cookie", "a=b; " * 500), ("Host", "x" * 300)]
#: Words in the type of a field that accept a value whose JSON text begins so.
WORDS = {"t": "bool", "f": "bool", '"': "str", "[": "ist", "{": "ict", "n": "None"}


def request_fields() -> dict[str, dict[str, str]]:
    """Type of every field that SGLang's and our endpoints read, by endpoint."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_c2t.srt.hooks.control import CHANGEABLE, FORGET

    types, names = SamplingParams.__annotations__, SamplingParams.__struct_fields__
    models: dict[str, Any] = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
    return {
        "/generate": {f.name: str(f.type) for f in dataclasses.fields(GenerateReqInput)},
        SAMPLING: {name: str(types.get(name, "Any")) for name in names},
        **{
            path: {name: str(f.annotation) for name, f in model.model_fields.items()}
            for path, model in models.items()
        },
        "/c2t": dict.fromkeys((*CHANGEABLE, FORGET, "verify", "record", ""), "Any"),
        "/set_internal_state": {"server_args": "dict"},
    }


def mutants(fields: Mapping[str, Mapping[str, str]], count: int, seed: int = 0) -> list[Malformed]:
    """``count`` requests, the same for the same seed; each mutates the next of ``fields``.

    Every third mutates up to two more, every fifth spoils the bytes, every tenth adds odd headers.
    """
    rng = random.Random(f"mutants {seed}")
    every = [(path, name) for path, names in fields.items() for name in names]
    rng.shuffle(every)
    made = []
    for number, (path, name) in zip(range(count), itertools.cycle(every), strict=False):
        names = [name]
        if number % 3 == 2:
            names += rng.sample(list(fields[path]), min(2, len(fields[path])))
        body = VALID[path] | {n: f"HERE {i}" for i, n in enumerate(names)}
        text = json.dumps({**VALID["/generate"], "sampling_params": body} if path == SAMPLING
                          else body)  # fmt: skip
        for i, n in enumerate(names):
            text = text.replace(f'"HERE {i}"', _odd(rng, fields[path][n]))
        raw = _spoilt(rng, text.encode()) if number % 5 == 4 else text.encode()
        headers = {"Content-Type": "application/json"}
        if number % 10 == 9:
            headers.update([rng.choice(HEADERS)])
        name = f"{number}: {path} {', '.join(names)}"
        made.append(Malformed(name, path.split()[0], raw, headers=headers))
    return made


def _odd(rng: random.Random, kind: str) -> str:
    """JSON text of a value, mostly of a type that the field accepts."""
    fitting = [text for text in ODD if WORDS.get(text[0], "int") in kind]
    return rng.choice(fitting if fitting and rng.random() < 0.7 else ODD)


def _spoilt(rng: random.Random, raw: bytes) -> bytes:
    """The body cut, or with one byte changed."""
    at = rng.randrange(len(raw))
    return raw[:at] if rng.random() < 0.5 else raw[:at] + rng.randbytes(1) + raw[at + 1 :]

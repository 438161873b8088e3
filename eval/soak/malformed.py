"""Malformed requests: a list by hand, and mutants of valid requests by SGLang's own fields.

The list says nothing of the right answer: a server without speculation answers each request first,
and where it does not serve one, a ``--c2t`` server must refuse it. :data:`FATAL` ones end a stock
SGLang 0.5.23 server on the CPU; ``--c2t`` must refuse them. A mutant may be harmless: it must be
served or refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Tokens of a prompt and its answer on the soaked servers.
CONTEXT_LENGTH = 1024
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Malformed:
    """One request; ``raw`` goes out as it is."""

    name: str
    path: str = "/generate"
    raw: bytes = b"{}"
    method: str = "POST"
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    may_be_served: bool = False


#: Path and body to which a section of the TOML file adds fields.
_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {}),
    "option": ("/generate", {"text": "A", "sampling_params": {"max_new_tokens": 2}}),
    "completion": (COMPLETIONS, {"model": "m", "max_tokens": 2}),
    "chat": (
        CHAT, {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "A"}]},
    ),
}  # fmt: skip
_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")


def _made(section: str, name: str, own: dict[str, Any]) -> Malformed:
    """The request ``name``, from its entry in the TOML file."""
    if section == "raw":
        return Malformed(name, **{**own, "raw": own["raw"].encode()})
    if section == "endpoint":
        path, body = own["path"], own.get("body", {})
    elif section == "sampling":
        params = {"temperature": 0, "max_new_tokens": 4, **own}
        path, body = "/generate", {"text": "A", "sampling_params": params}
    else:
        path, base = _BASES[section]
        body = {**base, **own}
    name = f"{section}, {name}" if path.startswith("/v1/") and section != "endpoint" else name
    return Malformed(name, path, json.dumps(body).encode())


def _listed(kind: str) -> tuple[Malformed, ...]:
    sections = tomllib.loads(_TEXT)[kind].items()
    return tuple(_made(s, name, own) for s, rows in sections for name, own in rows.items())


_LONG: dict[str, dict[str, Any]] = {
    "text is null": {"text": None},
    "far longer than the context": {"text": "a b c d " * 4 * CONTEXT_LENGTH},
    "as long as the context": {"input_ids": [5] * CONTEXT_LENGTH},
    "one token short of the context": {"input_ids": [5] * (CONTEXT_LENGTH - 1)},
    "prompt and answer longer than the context": {
        "input_ids": [5] * (CONTEXT_LENGTH - 24), "sampling_params": {"max_new_tokens": 100},
    },
}  # fmt: skip
#: Requests that TOML cannot hold.
_ODD = (
    Malformed("bytes that are not UTF-8", raw=b'{"text": "\xff\xfe"}'),
    Malformed("5,000 brackets deep", raw=b'{"text":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    *(_made("generate", name, body) for name, body in _LONG.items()),
    _made("sampling", "5,000 stop strings", {"stop": [f"x{i}" for i in range(5000)]}),
)

#: Requests by hand that a soak sends.
MALFORMED = (*_ODD, *_listed("sent"))
FATAL = _listed("fatal")
HANGING = _listed("hanging")


# -- mutants --------------------------------------------------------------------------------

SAMPLING = "/generate sampling_params"
#: A valid body of each endpoint, JSON texts of odd values, and odd headers.
_MUTANTS = tomllib.loads(_TEXT)["mutants"]
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
        headers = (rng.choice(HEADERS),) if number % 10 == 9 else ()
        name = f"{number}: {path} {', '.join(names)}"
        made.append(Malformed(name, path.split()[0], raw, headers=headers, may_be_served=True))
    return made


def _odd(rng: random.Random, kind: str) -> str:
    """JSON text of a value, mostly of a type that the field accepts."""
    fitting = [text for text in ODD if WORDS.get(text[0], "int") in kind]
    return rng.choice(fitting if fitting and rng.random() < 0.7 else ODD)


def _spoilt(rng: random.Random, raw: bytes) -> bytes:
    """The body cut, or with one byte changed."""
    at = rng.randrange(len(raw))
    return raw[:at] if rng.random() < 0.5 else raw[:at] + rng.randbytes(1) + raw[at + 1 :]

"""Malformed requests, listed by hand.

The list says nothing of the right answer: a server without speculation answers each request first,
and where it does not serve one, a ``--c2t`` server must refuse it. :data:`FATAL` ones end a stock
SGLang 0.5.23 server on the CPU; ``--c2t`` must refuse them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


#: Path and body to which a section of the TOML file adds fields.
_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {}),
    "option": ("/generate", {"text": "A", "sampling_params": {"max_new_tokens": 2}}),
    "completion": (COMPLETIONS, {"model": "m", "max_tokens": 2}),
    "chat": (
        CHAT, {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "A"}]},
    ),
}  # fmt: skip
_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


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
    sections = _LISTS[kind].items()
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

"""Requests that no client should send. Knows nothing of how a server answers them.

What is right is not written here: a server without speculation answers each of them first. Where
it refuses (4xx) or fails (5xx) a ``--c2t`` server must refuse; what it takes, ``--c2t`` may take,
and the summary says so. :data:`FATAL` ones end a stock SGLang 0.5.23 server on the CPU
(``--fatal`` shows it, on servers of their own); ``--c2t`` must refuse them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Tokens of a prompt and its answer, of the servers that are soaked.
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
    """Sent beside the content type, or in its place."""


def _endpoint(name: str, path: str, body: Any = None) -> Malformed:
    return Malformed(name, path, json.dumps(body or {}).encode())


def _generate(name: str, **body: Any) -> Malformed:
    return _endpoint(name, "/generate", body)


def _sampling(name: str, **params: Any) -> Malformed:
    params = {"temperature": 0, "max_new_tokens": 4, **params}
    return _generate(name, text="A", sampling_params=params)


def _option(name: str, **fields: Any) -> Malformed:
    return _generate(name, text="A", sampling_params={"max_new_tokens": 2}, **fields)


def _completion(name: str, **fields: Any) -> Malformed:
    body = {"model": "m", "max_tokens": 2, **fields}
    return _endpoint(f"completion, {name}", COMPLETIONS, body)


def _chat(name: str, **fields: Any) -> Malformed:
    messages = [{"role": "user", "content": "A"}]
    body = {"model": "m", "max_tokens": 2, "messages": messages, **fields}
    return _endpoint(f"chat, {name}", CHAT, body)


#: What a section of the file makes of a name and what is written beside it.
_SECTIONS: dict[str, Callable[..., Malformed]] = {
    "generate": _generate,
    "sampling": _sampling,
    "option": _option,
    "completion": _completion,
    "chat": _chat,
    "endpoint": _endpoint,
}
_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")


def _listed(kind: str) -> tuple[Malformed, ...]:
    sections = tomllib.loads(_TEXT)[kind].items()
    return tuple(_SECTIONS[s](name, **own) for s, rows in sections for name, own in rows.items())


#: What no table can hold: bodies that are no JSON object, other methods, and sizes.
_ODD = (
    Malformed("JSON cut short", raw=b'{"text": "A"'),
    Malformed("no body", raw=b""),
    Malformed("a list", raw=b"[]"),
    Malformed("a string", raw=b'"A"'),
    Malformed("null", raw=b"null"),
    Malformed("bytes that are not UTF-8", raw=b'{"text": "\xff\xfe"}'),
    Malformed("5,000 brackets deep", raw=b'{"text":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    Malformed("content type text/plain", raw=b'{"text": "A"}', content_type="text/plain"),
    Malformed("temperature is 1e999", raw=b'{"text":"A","sampling_params":{"temperature":1e999}}'),
    Malformed("completion, JSON cut short", COMPLETIONS, b"{"),
    Malformed("completion, text/plain", COMPLETIONS, b'{"prompt": "A"}', content_type="text/plain"),
    Malformed("GET /generate", method="GET", raw=b""),
    Malformed("DELETE a completion", COMPLETIONS, b"", "DELETE"),
    Malformed("unknown model", "/v1/models/other", b"", "GET"),
    _generate("text is null", text=None),
    _generate("far longer than the context", text="a b c d " * 4 * CONTEXT_LENGTH),
    _generate("as long as the context", input_ids=[5] * CONTEXT_LENGTH),
    _generate("one token short of the context", input_ids=[5] * (CONTEXT_LENGTH - 1)),
    _generate(
        "prompt and answer longer than the context",
        input_ids=[5] * (CONTEXT_LENGTH - 24),
        sampling_params={"max_new_tokens": 100},
    ),
    _sampling("5,000 stop strings", stop=[f"x{i}" for i in range(5000)]),
)

#: All that are sent during a soak.
MALFORMED = (*_ODD, *_listed("sent"))
FATAL = _listed("fatal")
HANGING = _listed("hanging")

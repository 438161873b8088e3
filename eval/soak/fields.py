"""Malformed requests by field: each field that a request may have, with values it may not.

:mod:`eval.soak.mutations` spoils requests that people wrote down; a field without such a request is
not among them. Here the caller says which fields there are, as SGLang's own types do.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from eval.soak.malformed import CHAT, COMPLETIONS, Malformed
from eval.soak.mutations import ODD, Body

#: The least that each endpoint serves; fields are put into the object that the key names.
LEAST: dict[str, Body] = {
    "/generate": {"text": "A", "sampling_params": {"max_new_tokens": 2, "temperature": 0.5}},
    COMPLETIONS: {"model": "m", "prompt": "A", "max_tokens": 2},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "A"}], "max_tokens": 2},
    "/c2t": {"policy": "c2t"},
}
SAMPLING = "/generate sampling_params"

#: What some field might take for its own; addresses lead nowhere.
LIKELY: tuple[Any, ...] = (
    0, 1, 2, True, "a", ["a"], [0], [[0]], [5, 6], [0.5], [[0.5, 0.5]], [[0.5] * 256], [None],
    {"id": "nobody", "rid": "x", "offset": -1, "replace": True}, {"type": "json_object"},
    {"embeds": [[0.5] * 256], "positions": [0]}, {"type": "json_schema", "json_schema": {}},
    {"function": {"name": "f", "parameters": {}}, "type": "function"}, "data:image/png;base64,AA==",
    [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}],
    "http://127.0.0.1:9/x.png", ["127.0.0.1"], "last", "selected", "support", "regex", "((a*)*)*b",
    '{"type": "object"}', 'root ::= "a"', {"5": 1.0}, {"-1": 1}, {"99999999": 1.0}, [2**31],
    ["a", "b"], [["a"]], "\n", " ", [""], {"include_usage": True}, {"continuous_usage_stats": 5},
)  # fmt: skip

HEADERS: tuple[tuple[str, str], ...] = (
    ("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Content-Encoding", "x"),
    ("Content-Type", "application/json; charset=utf-16"), ("Content-Type", "\u00ff"),
    ("Accept", "x" * 4000), ("Accept-Encoding", "x"), ("Authorization", "Bearer"),
    ("Authorization", "\u00ff"), ("X-Request-Id", "x" * 4000), ("X-Request-Id", "\u00ff"),
    ("X-Data-Parallel-Rank", "9"), ("X-Data-Parallel-Rank", "x"), ("X-SMG-Routing-Key", "\u00ff"),
    ("traceparent", "00-0-0-x"), ("traceparent", "x" * 4000), ("X-SGLang-Priority", "x"),
    ("Range", "bytes=0-"), ("Host", "x" * 300), ("Cookie", "a=b; " * 500), ("TE", "trailers"),
    ("X-Forwarded-For", "\u00ff"), ("X-HTTP-Method-Override", "DELETE"), ("Upgrade", "websocket"),
)  # fmt: skip


#: Words in a type by which a value of ours may be one.
WORDS: dict[type, tuple[str, ...]] = {
    bool: ("bool", "Any"), int: ("int", "float", "Any"), float: ("float", "Any"),
    str: ("str", "Literal", "Any"), list: ("List", "list", "Any"), dict: ("Dict", "dict", "Any"),
    type(None): ("None", "Optional"),
}  # fmt: skip


def cases(
    fields: Mapping[str, Mapping[str, str]], count: int, seed: int = 0
) -> Iterator[Malformed]:
    """``count`` requests, the same for the same seed: by turns the next field with a value drawn,
    mostly of its type; every third with one or two further fields; every tenth with odd headers.

    ``fields`` by endpoint, those of :data:`SAMPLING` inside, each with its type.
    """
    dice = random.Random(f"fields {seed}")
    every = [(path, name) for path, names in fields.items() for name in names]
    dice.shuffle(every)
    for number, (path, name) in zip(range(count), itertools.cycle(every), strict=False):
        endpoint = path.partition(" ")[0]
        body = json.loads(json.dumps(LEAST[endpoint]))
        holder = body["sampling_params"] if path == SAMPLING else body
        names = [name]
        if number % 3 == 2:
            names += dice.sample(list(fields[path]), dice.randint(1, min(2, len(fields[path]))))
        for one in names:
            holder[one] = dice.choice(_values(fields[path][one] if dice.random() < 0.8 else "Any"))
        headers = (dice.choice(HEADERS),) if number % 10 == 9 else ()
        what = f"{number}: {path} {', '.join(names)}"
        yield Malformed(what, endpoint, json.dumps(body).encode(), headers=headers)


@functools.cache
def _values(kind: str) -> list[Any]:
    """Those that a field of this type might take; any where none might."""
    every = [*ODD, *LIKELY]
    return [v for v in every if any(word in kind for word in WORDS[type(v)])] or every

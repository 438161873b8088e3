"""Malformed requests by the hundred: valid ones, spoilt in ways drawn with a fixed seed.

The hand-written list is :mod:`eval.soak.malformed`. Here nobody says what the answer should be:
some mutants are harmless and served, the others must be refused, and none may end a server or be
answered with its fault.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from eval.soak.malformed import CHAT, COMPLETIONS, Malformed

#: Valid requests, each with most of the fields that its endpoint reads.
VALID: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": "A",
        "sampling_params": {
            "max_new_tokens": 3, "min_new_tokens": 1, "temperature": 0.5, "top_p": 0.9,
            "top_k": 20, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5,
            "repetition_penalty": 1.1, "stop": ["xx"], "stop_token_ids": [3], "n": 1,
            "logit_bias": {"5": 1.0}, "ignore_eos": False, "skip_special_tokens": True,
            "no_stop_trim": False, "stream_interval": 1, "sampling_seed": 7,
            "custom_params": {"c2t": False},
        },
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
        "token_ids_logprob": [3], "stream": False, "return_text_in_logprobs": False,
        "priority": 0, "extra_key": "x", "cache_salt": "y", "log_metrics": True,
        "return_prompt_token_ids": False, "routed_dp_rank": 0,
    },
    COMPLETIONS: {
        "model": "m", "prompt": "A", "max_tokens": 3, "min_tokens": 1, "temperature": 0.5,
        "top_p": 0.9, "top_k": 20, "min_p": 0.1, "n": 1, "seed": 7, "stop": ["xx"],
        "stop_token_ids": [3], "logit_bias": {"5": 1.0}, "logprobs": 2, "echo": False,
        "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1,
        "ignore_eos": False, "stream": False, "custom_params": {"c2t": True}, "user": "u",
    },
    CHAT: {
        "model": "m", "messages": [{"role": "user", "content": "A"}], "max_tokens": 3,
        "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "n": 1, "seed": 7,
        "stop": ["xx"], "logit_bias": {"5": 1.0}, "logprobs": True, "top_logprobs": 2,
        "frequency_penalty": 0.5, "presence_penalty": 0.5, "stream": False,
        "response_format": {"type": "text"}, "user": "u",
    },
    "/c2t": {"policy": "c2t", "beta": 0.5, "classifier": "default", "policy_options": {}},
    "/set_internal_state": {"server_args": {"pp_max_micro_batch_size": 8}},
}  # fmt: skip

#: What a field becomes. None asks for much work: a mutant that is served is served at once.
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1.5, -0.0, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1,
    2**64, 10**30, 1e300, -1e300, 1e-300, "", "x", "0", "1e5", "\0", "\ud800", "\u202e", "x" * 5000,
    "../../etc/passwd", "/etc/passwd", "os:system", "%s%n", [], [None], [[]], [1, "x"],
    [2**63], ["x"] * 40, {}, {"x": 1}, {"": ""}, {"c2t": 0}, {"__class__": "x"}, {"5": 1e300},
)  # fmt: skip

Body = dict[str, Any]


def mutants(count: int, seed: int = 0) -> list[Malformed]:
    """``count`` requests, the same for the same seed, turning the endpoints by."""
    rng = random.Random(f"mutants {seed}")
    paths = list(VALID)
    made = []
    for number in range(count):
        path = paths[number % len(paths)]
        name, spoil = rng.choice(KINDS)
        body = json.loads(json.dumps(VALID[path]))
        raw = spoil(rng, body)
        method, content_type = "POST", "application/json"
        if rng.random() < 0.04:
            content_type = rng.choice(("text/plain", "", "application/xml", "multipart/form-data"))
        if rng.random() < 0.02:
            method = rng.choice(("PUT", "DELETE", "PATCH", "OPTIONS"))
        made.append(Malformed(f"{number}: {name}, {path}", path, raw, method, content_type))
    return made


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))


def _place(rng: random.Random, body: Body) -> tuple[Any, Any]:
    """A container somewhere in the body, and a key of it."""
    holders: list[Any] = [body]
    for value in body.values():
        holders += [v for v in (value, *(value if isinstance(value, list) else ())) if v]
    holder = rng.choice([h for h in holders if h and isinstance(h, (dict, list))])
    return holder, rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))


def _swapped(rng: random.Random, body: Body) -> bytes:
    """One value becomes an odd one."""
    holder, key = _place(rng, body)
    holder[key] = _odd(rng)
    return json.dumps(body).encode()


def _several(rng: random.Random, body: Body) -> bytes:
    for _ in range(rng.randint(2, 5)):
        holder, key = _place(rng, body)
        holder[key] = _odd(rng)
    return json.dumps(body).encode()


def _wrapped(rng: random.Random, body: Body) -> bytes:
    """One value stands in a list, or in lists in lists."""
    holder, key = _place(rng, body)
    for _ in range(rng.choice((1, 2, 60))):
        holder[key] = [holder[key]]
    return json.dumps(body).encode()


def _without(rng: random.Random, body: Body) -> bytes:
    for _ in range(rng.randint(1, 3)):
        if body:
            body.pop(rng.choice(list(body)))
    return json.dumps(body).encode()


def _more(rng: random.Random, body: Body) -> bytes:
    """A key that nobody knows, or knows from elsewhere."""
    other = VALID[rng.choice(list(VALID))]
    key = rng.choice([*other, "", "x" * 300, "__init__", "\0", "c2t", "lora_path", "image_data"])
    body[key] = rng.choice((_odd(rng), *other.values()))
    return json.dumps(body).encode()


def _twice(rng: random.Random, body: Body) -> bytes:
    key = rng.choice(list(body))
    again = json.dumps({key: _odd(rng)})[1:]
    return f"{json.dumps(body)[:-1]}, {again}".encode()


def _nested(rng: random.Random, body: Body) -> bytes:
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    depth = rng.choice((100, 3000))
    body[rng.choice(list(body))] = "HERE"
    bomb = opening * depth + "1" + closing * depth
    return json.dumps(body).replace('"HERE"', bomb).encode()


def _cut(rng: random.Random, body: Body) -> bytes:
    raw = json.dumps(body).encode()
    return raw[: rng.randrange(len(raw))]


def _flipped(rng: random.Random, body: Body) -> bytes:
    """Some bytes become others, printable or not."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def _no_number(rng: random.Random, body: Body) -> bytes:
    holder, key = _place(rng, body)
    holder[key] = "HERE"
    odd = rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "1" * 5000, "0x1"))
    return json.dumps(body).replace('"HERE"', odd).encode()


def _no_object(rng: random.Random, _body: Body) -> bytes:
    return json.dumps(_odd(rng)).encode()


KINDS: tuple[tuple[str, Callable[[random.Random, Body], bytes]], ...] = (
    ("odd value", _swapped), ("odd value", _swapped), ("odd value", _swapped),
    ("odd values", _several), ("in a list", _wrapped), ("fields gone", _without),
    ("another field", _more), ("a key twice", _twice), ("nested", _nested), ("cut", _cut),
    ("bytes flipped", _flipped), ("no number", _no_number), ("no object", _no_object),
)  # fmt: skip

"""Files that no user should name: those that are none, and valid ones spoilt in every place."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

#: Seconds that a file may take.
PATIENCE = 10

NUMBERS = (1e308, -1, 0, 5e-324, 1e-300, 3.5e38, 10**9, 2**31, 2**63, 2**64, 10**400, True, 0.5)
OTHERS = (None, "x", "", "\0", "\ud800", "9" * 5000, [], [None], [[]] * 1000, {}, {"x": 1})
RAW = ("NaN", "Infinity", "1e999", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900)


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise AssertionError(f"not done within {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: Exception) -> None:
    assert "\n" not in str(error), error
    assert len(str(error)) < 2000, str(error)[:200]


# -- files that are none -----------------------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name may not be long
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def raw_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": _fifo, "socket": _socket, "directory": Path.mkdir, "a terabyte of nothing": _sparse,
    **{f"link to {target}": _link(target) for target in (
        "/dev/zero", "/dev/full", "/dev/null", "/dev/urandom", "/proc/self/mem", "/proc/kmsg",
        "nowhere", ".", "/proc/self/fd/0")},
    "link to itself": lambda path: path.symlink_to(path),
    "nothing in it": raw_bytes(b""), "NULs": raw_bytes(b"\0" * 4096),
    "not UTF-8": raw_bytes(b"\xff\xfe{"),
    "a BOM": raw_bytes(b"\xef\xbb\xbf{}"), "brackets": raw_bytes(b"[" * 1_000_000),
    "digits": raw_bytes(b"9" * 1_000_000), "a text": raw_bytes(b'"x"'), "a list": raw_bytes(b"[]"),
}  # fmt: skip


# -- JSON and safetensors, spoilt ---------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in the value, with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)) and value[key]:
            yield from places(value[key])


def spoilt(valid: Any, count: int, seed: int = 0) -> Iterator[bytes]:
    """The valid value with one place made odd, or gone, or twice; the same for the same seed."""
    dice = random.Random(seed)
    for number in range(count):
        value = copy.deepcopy(valid)
        holder, key = dice.choice(list(places(value)))
        if number % 5 == 4:
            raw = dice.choice(RAW)
            holder[key] = "HERE"
            yield json.dumps(value).replace('"HERE"', raw).encode()
            continue
        if number % 7 == 6 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = copy.deepcopy(dice.choice(NUMBERS if number % 3 else OTHERS))
        yield json.dumps(value).encode()


def safetensors(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def spoilt_safetensors(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Headers spoilt as JSON, bodies cut, and tensors of odd values."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    for length in (0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1):
        yield safetensors(header, body, length=length)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for entries in (1000, 100_000):
        yield safetensors({**header, **{f"x{i}": empty for i in range(entries)}}, body)
    for cut in (1, 7, len(body) // 2, len(body)):
        yield safetensors(header, body[:-cut])
    yield safetensors(header, body + b"\0" * 100)
    for text in spoilt(header, count, seed):
        yield safetensors(text, body)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


ODD_VALUES = (3e38, -3e38, 1e30, float("nan"), float("inf"), -float("inf"), 1e-45, 0.0)

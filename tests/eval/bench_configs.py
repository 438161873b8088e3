"""Configurations of the benchmark for tests, as the tables of their TOML files."""

from __future__ import annotations

import copy
from typing import Any

from eval.bench.config import BenchConfig, build

TABLE: dict[str, Any] = {
    "name": "test",
    "repeats": 2,
    "server": {"device": "cpu", "mode": "together", "starting": 2},
    "requests": {"max_new_tokens": 16, "warm_up": 2},
    "load": [
        {"temperature": 0.0, "concurrency": [1, 4], "prompts": [2, 8]},
        {"temperature": 1.0, "concurrency": [4], "prompts": [6]},
    ],
    "dataset": {
        "parts": [
            {"source": "demo:math", "n": 4},
            {"source": "demo:chat", "n": 4},
        ]
    },
    "methods": [
        {"kind": "none"},
        {"kind": "fixed", "num_steps": 3},
        {"kind": "c2t", "policy": "c2t"},
        {"kind": "c2t", "policy": "dyjoint", "beta": 0.2},
        {"kind": "c2t", "policy": "dyjoint", "beta": 0.5},
        {"kind": "c2t-tree", "policy": "c2t-plus", "topk": 4, "num_draft_tokens": 16},
    ],
}


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The tables with some keys replaced; ``server__mode`` is key ``mode`` of table ``server``."""
    tables = copy.deepcopy(base)
    for name, value in changes.items():
        *path, key = name.split("__")
        inner = tables
        for part in path:
            inner = inner.setdefault(part, {})
        inner[key] = value
    return tables


def config(base: dict[str, Any] = TABLE, **changes: Any) -> BenchConfig:
    """The configuration of these tables."""
    return build(BenchConfig, changed(base, **changes))

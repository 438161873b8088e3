"""Replaces SGLang's speculative worker by ours, in scheduler processes only. It is separate from
``worker.py`` because every process imports it, and the worker imports SGLang's model code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_c2t.config import ConfigError, active
from sglang_c2t.srt import seams


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND hook on ``SpeculativeAlgorithm.create_worker``: returns our class if C2T is on."""
    stock = original(algorithm, server_args)
    if active() is None:
        return stock
    seams.require_seams()
    from sglang_c2t.srt.worker import WORKERS

    if stock not in WORKERS:
        raise ConfigError(
            f"--c2t does not serve the worker {stock.__name__} of {algorithm}; "
            f"it serves {', '.join(cls.__name__ for cls in WORKERS)}"
        )
    return WORKERS[stock]

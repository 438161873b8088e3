"""Times of a target forward, from the host's clock or the device's events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_c2t.srt import attach, compat


class Mark:
    """A point in time, on the device if there is one."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self._event = torch.cuda.Event(enable_timing=True) if on_cuda else None
        self._at = 0.0

    def set(self) -> None:
        """Record the current time, or on a device the time when it gets here."""
        if self._event is None:
            self._at = time.perf_counter()
        else:
            self._event.record()

    @property
    def passed(self) -> bool:
        """Whether the device has passed it."""
        return self._event is None or bool(self._event.query())

    def until(self, later: Mark) -> float:
        """Return milliseconds to a ``later`` mark; both must have passed."""
        if self._event is None or later._event is None:
            return (later._at - self._at) * 1e3
        return float(self._event.elapsed_time(later._event))


@contextmanager
def timed_forward(target_worker: Any, on_cuda: bool) -> Iterator[tuple[Mark, Mark]]:
    """Yield marks at the begin and the end of the target forward inside the block.

    Args:
        target_worker: SGLang's.
        on_cuda: Whether the target runs on a GPU.
    """
    forward = target_worker.forward_batch_generation
    begin, end = Mark(on_cuda), Mark(on_cuda)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin.set()
        # Set again before a graph: the device idles until the replay has been launched.
        with compat.before_replay(target_worker.model_runner, begin.set):
            result = forward(*args, **kwargs)
        end.set()
        return result

    with attach.swapped(target_worker, "forward_batch_generation", timed):
        yield begin, end

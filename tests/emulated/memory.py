"""Memory of the emulated device, and pinned memory of the host.

A block without a holder goes back to the stream that it was allocated on, which may
overwrite it from its next allocation on: it is poisoned there, behind the streams that were
recorded on it and no other, as PyTorch's caching allocator would reuse it. Fresh memory is poisoned
as well.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tests.emulated.queues import Event, Stream


class Block:
    """An allocation, held by every tensor that lies in it."""

    held = 0
    """Bytes of all blocks that have a holder."""

    limit: int | None = None
    """Bytes that all blocks may have; ``None``: as many as the host has."""

    def __init__(self, memory: Tensor, stream: Stream | None) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        Block.held += self._bytes.numel()
        self._stream = stream
        self._others: set[Stream] = set()
        if Block.limit is not None and Block.held > Block.limit:
            tried, held = (size / 2**20 for size in (self._bytes.numel(), Block.held))
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {tried:.2f} MiB, {held:.2f} MiB with it, "
                f"of {Block.limit / 2**20:.2f} MiB."
            )

    def record(self, stream: Stream) -> None:
        """The ``stream`` uses it, too."""
        self._others.add(stream)

    def __del__(self) -> None:
        Block.held -= self._bytes.numel()
        if self._stream is None:  # a graph's own, which stays its own
            return
        users = []
        for other in self._others:
            users.append(Event())
            users[-1].record(other)
        self._stream.freed.append(partial(_overwrite, self._bytes, users))


def _overwrite(memory: Tensor, users: list[Event]) -> None:
    for used in users:
        used.synchronize()
    poison(memory)


def poison(memory: Tensor) -> None:
    """Nothing that anybody computed: nan, or numbers that are no index of anything."""
    if memory.dtype.is_floating_point or memory.dtype.is_complex:
        memory.fill_(float("nan"))
    elif memory.dtype == torch.uint8:
        memory.fill_(0xFF)  # of floats nan, of integers -1
    elif memory.dtype == torch.bool:
        memory.fill_(True)
    else:
        memory.fill_(max(-(2**30), torch.iinfo(memory.dtype).min))


def pin(tensor: Tensor) -> Tensor:
    """The tensor, in memory that copies may use while the host goes on."""
    tensor.untyped_storage().emulated_pinned = True
    return tensor


def pinned(tensor: Tensor) -> bool:
    """Whether its memory is."""
    return getattr(tensor.untyped_storage(), "emulated_pinned", False)

"""CUDA graphs of the emulated device: what was launched, done again on the same memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from tests.emulated.device import DEVICE, Refused
from tests.emulated.memory import Block, poison
from tests.emulated.queues import Work


class Graph:
    """In place of ``torch.cuda.CUDAGraph``.

    A replay finds nothing in memory that only the graph itself writes: other graphs of its pool
    may have used it.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.names: list[str] = []
        self._work: list[Work] = []
        self._allocated: list[tuple[weakref.ref[Block], Tensor]] = []
        self._own: list[Tensor] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Record later launches in place of doing them."""
        if DEVICE.capture is not None:
            raise Refused("a capture inside a capture")
        DEVICE.capture = self

    def capture_end(self) -> None:
        """No more of it."""
        if DEVICE.capture is not self:
            raise Refused("the capture of another graph ends")
        DEVICE.capture = None
        self._own = [memory for block, memory in self._allocated if block() is None]
        self._allocated.clear()

    def add(self, name: str, work: Work) -> None:
        """A launch during the capture."""
        self.names.append(name)
        self._work.append(work)

    def allocated(self, block: Block, memory: Tensor) -> None:
        """An allocation during the capture."""
        self._allocated.append((weakref.ref(block), memory))

    def replay(self) -> None:
        """All of it once more, as one launch."""
        DEVICE.refuse_in_capture("the replay of a graph")
        DEVICE.tally["launches in graphs"] += len(self._work)
        DEVICE.launch("graph", self._again, "replays")

    def _again(self) -> None:
        for memory in self._own:
            poison(memory)
        for work in self._work:
            work()

    def pool(self) -> tuple[int, int]:
        """All graphs share one."""
        return 0, 1

    def reset(self) -> None:
        """Nothing is left of it."""
        self.__init__()

"""Streams and events of an emulated device: work that is done as late as a program allows.

A piece of work runs when a caller waits for it, after all that stands before it in its stream and
all that this waits for, and nothing else runs then. So whoever should have waited and did not finds
work undone each time, where a GPU lets it happen now and then. Knows nothing of torch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

Work = Callable[[], object]

#: Held by the thread that does work, which may wait for other work: weights are loaded by several.
_DOING = threading.RLock()


class Stream:
    """Work that is done in the order in which it was given."""

    def __init__(self) -> None:
        self._undone: deque[Work] = deque()
        self.given = 0
        """Pieces of work, ever."""
        self.freed: list[Work] = []
        """Overwrites freed memory at the next allocation."""

    @property
    def done(self) -> int:
        """Number of finished pieces of work."""
        return self.given - len(self._undone)

    def give(self, work: Work) -> None:
        """One more piece."""
        self._undone.append(work)
        self.given += 1

    def reuse(self) -> None:
        """It allocates: memory that was given back is in use again."""
        with _DOING:
            for overwrite in self.freed:
                self.give(overwrite)
            self.freed.clear()

    def finish(self, upto: int | None = None) -> None:
        """Do the first ``upto`` pieces that were ever given; ``None``: all of them."""
        upto = self.given if upto is None else upto
        with _DOING:
            while self.done < upto:
                self._undone.popleft()()

    def wait(self, event: Event) -> None:
        """Run later work after the work before the event."""
        if event.finish is not None:
            self.give(event.finish)


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self.finish: Work | None = None
        """Does all before that place; ``None``: it was never recorded."""
        self._asked = False

    def record(self, stream: Stream) -> None:
        """It stands behind all that the stream was given so far."""
        self.finish, self._asked = partial(stream.finish, stream.given), False

    def synchronize(self) -> None:
        """The host waits."""
        if self.finish is not None:
            self.finish()

    def query(self) -> bool:
        """Whether all before it is done: who asks for the first time came too early."""
        early, self._asked = not self._asked, True
        if early and self.finish is not None:
            return False
        if self.finish is not None:
            self.finish()  # the host has not waited, the device has continued
        return True

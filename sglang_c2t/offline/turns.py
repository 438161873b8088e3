"""Servers that run in turn on one machine, each for a few seconds, with a clock of its own.

Other work on the machine then slows all of them down equally.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: Seconds of a turn: much longer than a step, much shorter than a slow moment of a shared machine.
SECONDS = 4.0


class Turns:
    """Stops all servers but one.

    Args:
        groups: Process groups of the servers, by name.
        seconds: Length of a turn.
    """

    def __init__(self, groups: Mapping[str, int], seconds: float = SECONDS) -> None:
        self._groups, self._seconds = dict(groups), seconds
        # Seconds that each has run, and since when it runs now.
        self._clocks: dict[str, tuple[float, float | None]] = dict.fromkeys(groups, (0.0, None))
        self._done = {name: threading.Event() for name in groups}
        self.over = False
        """Whether all servers run again, at once, and so do their clocks."""

    def clock(self, name: str) -> float:
        """Return the seconds that a server has run."""
        ran, since = self._clocks[name]
        return ran if since is None else ran + time.perf_counter() - since

    def done(self, name: str) -> None:
        """Give a server no further turns."""
        self._done[name].set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let the servers take turns inside the block. All run after it."""
        self._signal(signal.SIGSTOP, *self._groups)
        thread = threading.Thread(target=self._rotate, daemon=True)
        thread.start()
        try:
            yield
        finally:
            for done in self._done.values():
                done.set()
            thread.join()
            self.over, now = True, time.perf_counter()
            self._clocks = {name: (self.clock(name), now) for name in self._groups}
            self._signal(signal.SIGCONT, *self._groups)

    def _rotate(self) -> None:
        while names := [name for name, done in self._done.items() if not done.is_set()]:
            for name in random.sample(names, len(names)):
                if self._done[name].is_set():
                    continue
                self._signal(signal.SIGCONT, name)
                self._clocks[name] = self.clock(name), time.perf_counter()
                self._done[name].wait(self._seconds)
                self._signal(signal.SIGSTOP, name)
                self._clocks[name] = self.clock(name), None

    def _signal(self, sig: int, *names: str) -> None:
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._groups[name], sig)

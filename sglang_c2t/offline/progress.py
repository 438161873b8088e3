"""Progress of long commands: bars in a terminal, in a log or a pipe a line per half minute."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 30.0


def progress_on(on: Console, *, transient: bool = False) -> Progress:
    """How much of each task is done, and how long the rest may take; used with ``with``. Bars that
    are ``transient`` are gone behind it.
    """
    shown = Progress if on.is_terminal else _Lines
    return shown(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=on,
        redirect_stdout=False,
        redirect_stderr=False,
        speed_estimate_period=600,
        transient=transient,
        disable=not on.is_terminal,
    )


class _Lines(Progress):
    """Says in words what bars would show, whether or not anything has moved since."""

    def start(self) -> None:
        """Begin to tell."""
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell, daemon=True)
        self._teller.start()

    def stop(self) -> None:
        """Nothing is told from here on."""
        self._over.set()
        self._teller.join()

    def _tell(self) -> None:
        while not self._over.wait(LINE_SECONDS):
            for line in filter(None, map(_line, self.tasks)):
                self.console.print(line, markup=False)
                self.console.file.flush()


def _line(task: Task) -> str:
    """Empty for what is not shown, or done."""
    if not task.visible or task.finished:
        return ""
    return ", ".join(_parts(task))


def _parts(task: Task) -> Iterator[str]:
    of = f" of {task.total:.0f}" if task.total is not None else ""
    yield f"{task.description or 'requests'}: {task.completed:.0f}{of}"
    if task.elapsed is not None:
        yield f"{timedelta(seconds=int(task.elapsed))} so far"
    if task.time_remaining is not None:
        yield f"about {timedelta(seconds=int(task.time_remaining))} left"

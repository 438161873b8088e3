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
    """A context manager that shows how much of each task is done and how long the rest may take.
    ``transient`` bars are removed at the end.
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
    """Prints as lines what bars would show, even without progress since the last line."""

    def start(self) -> None:
        """Start to print lines."""
        self._over = threading.Event()
        self._printer = threading.Thread(target=self._print, daemon=True)
        self._printer.start()

    def stop(self) -> None:
        """Print no more lines."""
        self._over.set()
        self._printer.join()

    def _print(self) -> None:
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

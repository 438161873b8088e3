"""One kind of console and of tables for all commands, and their way to stop at SIGTERM.

Servers are process groups of their own, and would outlive a command that just ended.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def console(width: int = 140) -> Console:
    """As wide as the terminal; in a log or a pipe ``width``, so that rows stay on one line.

    Its file is bound here: what redirects stdout later does not reach it.
    """
    found = Console(file=sys.stdout, highlight=False)
    return found if found.is_terminal else Console(file=sys.stdout, width=width, highlight=False)


def table(title: str | None, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table: columns of words, behind them those of ``numbers``."""
    found = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name in numbers:
        found.add_column(name, justify="right")
    return found


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM is a KeyboardInterrupt here, so that whoever started servers stops them.

    Only the first: ``timeout`` sends it twice, and the second would interrupt the stopping.
    """

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""One kind of console and of tables for all commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

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

"""Cells, rows and intervals of the Markdown tables under ``eval/``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sglang_c2t.offline.compare import Array, interval


def rule(numbers: int, words: int = 1) -> str:
    """The line under a header: columns of ``words`` to the left, of ``numbers`` to the right."""
    return "|" + "---|" * words + "---:|" * numbers


def row(first: str, cells: Sequence[str]) -> str:
    """One line, header or body."""
    return f"| {first} | " + " | ".join(cells) + " |"


def section(
    title: str, text: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]
) -> list[str]:
    """A heading, what to know before reading, and a table whose first column names its rows."""
    return [
        title,
        "",
        text,
        "",
        row(columns[0], columns[1:]),
        rule(len(columns) - 1),
        *(row(name, cells) for name, cells in rows),
        "",
    ]


def with_interval(once: Array, drawn: Array) -> str:
    """A value [1] and the interval of its resamples [S]."""
    return f"{once[0]:.2f}" + bracket(drawn)


def bracket(drawn: Array) -> str:
    """The interval of resamples [S]; instead of it, how many have no value, if some have none."""
    low, high = interval(drawn)
    return unreached(drawn) or f" [{low:.2f}, {high:.2f}]"


def unreached(drawn: Array) -> str:
    """In how many of the resamples [S] a curve did not reach the accept length; empty if in all."""
    missing = int(np.isnan(drawn).sum())
    return f" (not reached in {missing} of {len(drawn)})" if missing else ""


def difference(once: Array, drawn: Array) -> str:
    """A paired difference [1] with the interval of its resamples [S], marked as by `signed`."""
    return (
        ("-" if np.isnan(once[0]) else f"{once[0]:+.1f}") + unreached(drawn)
        if np.isnan(drawn).any()
        else signed(float(once[0]), *interval(drawn))
    )


def signed(value: float, low: float, high: float) -> str:
    """A difference: bold where the interval says less, italic where it says more."""
    text = f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if high < 0 else f"*{text}*" if low > 0 else text


def mix(groups: Sequence[str]) -> str:
    """How many of each group: ``2 code, 3 math``."""
    return ", ".join(f"{groups.count(name)} {name}" for name in sorted(set(groups)))

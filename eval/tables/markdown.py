"""Cells, rows and intervals of the Markdown tables under ``eval/``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sglang_c2t.offline.curves import Array, interval


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


def with_interval(values: Array) -> str:
    """A value and the interval of its resamples [1 + S], or how many of these have none."""
    low, high = interval(values[1:])
    return f"{values[0]:.2f}" + (unreached(values) or f" [{low:.2f}, {high:.2f}]")


def unreached(values: Array) -> str:
    """In how many resamples a curve did not reach the accept length; empty if it did in all."""
    missing = int(np.isnan(values[1:]).sum())
    return f" (not reached in {missing} of {len(values) - 1})" if missing else ""


def difference(values: Array) -> str:
    """A paired difference with the interval of its resamples [1 + S], marked as by `signed`."""
    if missing := unreached(values):
        return ("-" if np.isnan(values[0]) else f"{values[0]:+.1f}") + missing
    return signed(float(values[0]), *interval(values[1:]))


def signed(value: float, low: float, high: float) -> str:
    """A difference: bold where the interval says less, italic where it says more."""
    text = f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if high < 0 else f"*{text}*" if low > 0 else text


def mix(groups: Sequence[str]) -> str:
    """How many of each group: ``2 code, 3 math``."""
    return ", ".join(f"{groups.count(name)} {name}" for name in sorted(set(groups)))

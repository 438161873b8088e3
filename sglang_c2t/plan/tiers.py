"""Token tiers: the row counts for which verification is captured in a CUDA graph.

A graph has a fixed number of rows T and of request slots S. A batch of B requests with R rows
runs in the smallest tier with R <= T and B <= S; its last T - R rows are padding. Tiers are close
where a row is expensive. Above 64 rows, padding is less than an eighth of a tier.

Legend: B requests, R rows, T rows of a tier, S its slots, N most rows of one request.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sglang_c2t.plan.cost import size_bucket

#: Row count from which on tiers have a spacing, and that spacing.
_STEPS = ((0, 1), (2, 2), (4, 4), (8, 8), (128, 16), (256, 32), (512, 64), (1024, 128))


@dataclass(frozen=True)
class Tiers:
    """The tiers of a server."""

    max_requests: int
    """Most requests of a batch that runs in a graph."""

    width: int
    """N: rows of a request, its root included."""

    max_rows: int | None = None
    """Rows of the largest tier; ``None``: N for each of ``max_requests``."""

    rows_per_slot: int = 1
    """T / S for small T. FlashInfer sizes its query tiles for T - S + 1 rows of one request. With S
    = T they are the smallest and read the keys again for every few rows of a large tree. But a tier
    with S < T cannot hold T bare roots.
    """

    admits: Callable[[int, int], bool] | None = None
    """Whether attention supports a graph of T rows and S slots; ``None``: any."""

    @cached_property
    def rows(self) -> list[int]:
        """T of every tier, increasing. For 4 requests of up to 6 rows: 1, 2, 4, 8, 16, 24."""
        if self.admits is None:
            return self.all_rows
        return [rows for rows in self.all_rows if self.admits(rows, self.slots(rows))]

    @cached_property
    def all_rows(self) -> list[int]:
        """T of every tier, including those that attention does not support."""
        most = self.max_requests * self.width
        if self.max_rows is not None:
            most = min(most, max(self.max_rows, self.max_requests))
        tiers = [1]
        while tiers[-1] < most:
            step = max(step for start, step in _STEPS if start <= tiers[-1])
            tiers.append(min((tiers[-1] // step + 1) * step, most))
        return tiers

    def slots(self, rows: int) -> int:
        """Return S of the tier with T = ``rows``."""
        fewest = -(-rows // self.width)  # a capture spreads T rows over S requests of at most N
        return min(max(rows // self.rows_per_slot, fewest), self.max_requests)

    def pick(self, rows: int, requests: int, *, alone: bool = True) -> int | None:
        """Return T of the smallest tier for R ``rows`` of B ``requests``; ``None`` if none holds
        them.

        Padding rows need a slot of their own. SGLang's layout would give them to the last request,
        whose window they may overrun. If not ``alone``, the numbers are the maxima of several
        batches, and another batch has fewer rows.
        """
        for tier in self.rows[bisect.bisect_left(self.rows, rows) :]:
            free = self.slots(tier) - requests
            if free > 0 or (alone and free == 0 and rows == tier):
                return tier
        return None


def spread(sizes: Sequence[int], count: int = 8) -> tuple[list[int], list[int]]:
    """Choose which of the increasing ``sizes`` to measure: a span, and the sizes between.

    The span is at most ``count`` sizes in a geometric sequence from the first to the last. The
    others are those in no :func:`size_bucket` of the span.

    It prefers round sizes, because kernels are tuned for these. A cost interpolated between two
    slow sizes would hide the fast ones.
    """
    wanted = [size_bucket(round(goal), bits=2) for goal in np.geomspace(sizes[0], sizes[-1], count)]
    wanted[-1] = sizes[-1]
    span = sorted({min(sizes, key=lambda size: abs(size - goal)) for goal in wanted})
    known = {size_bucket(size) for size in span}
    return span, [size for size in sizes if size_bucket(size) == size and size not in known]

"""Token tiers: the row counts for which verification is captured in a CUDA graph.

A graph has a fixed number of rows T and of request slots S. A batch of B requests with R rows
runs in the smallest tier with R <= T and B <= S; its last T - R rows are padding. Fine steps
where a row is dear, coarse ones where a few rows in a thousand do not matter: less than an
eighth of a tier above 64 rows is padding.

Pure Python; knows neither torch nor SGLang.

Legend: B requests, R rows, T rows of a tier, S its slots, N most rows of one request.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

#: From so many rows on, tiers are so many rows apart.
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
    """T / S where T is small. FlashInfer sizes its query tiles for T - S + 1 rows of one
    request: with S = T they are the smallest, and read the keys again for every few rows of a
    large tree. Then again a tier with S < T cannot hold T bare roots."""

    admits: Callable[[int, int], bool] | None = None
    """Whether attention can serve a graph of T rows and S slots; ``None``: any."""

    @cached_property
    def rows(self) -> list[int]:
        """T of every tier, rising. For 4 requests of up to 6 rows: 1, 2, 4, 8, 16, 24."""
        if self.admits is None:
            return self.all_rows
        return [rows for rows in self.all_rows if self.admits(rows, self.slots(rows))]

    @cached_property
    def all_rows(self) -> list[int]:
        """T of every tier, those included that attention cannot serve."""
        most = self.max_requests * self.width
        if self.max_rows is not None:
            most = min(most, max(self.max_rows, self.max_requests))
        tiers = [1]
        while tiers[-1] < most:
            step = max(step for start, step in _STEPS if start <= tiers[-1])
            tiers.append(min((tiers[-1] // step + 1) * step, most))
        return tiers

    def slots(self, rows: int) -> int:
        """S of the tier with T = ``rows``."""
        fewest = -(-rows // self.width)  # a capture spreads T rows over S requests of at most N
        return min(max(rows // self.rows_per_slot, fewest), self.max_requests)

    def pick(self, rows: int, requests: int, *, alone: bool = True) -> int | None:
        """T of the smallest tier for R ``rows`` of B ``requests``; ``None``: none holds them.

        Padding rows need a slot of their own: SGLang's layout would give them to the last
        request, whose window they may overrun. Not ``alone``, these are the most of several
        batches, of which another one has fewer rows.
        """
        for tier in self.rows[bisect.bisect_left(self.rows, rows) :]:
            free = self.slots(tier) - requests
            if free > 0 or (alone and free == 0 and rows == tier):
                return tier
        return None

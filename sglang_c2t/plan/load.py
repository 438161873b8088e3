"""What a server has learnt about its load: how long drafts get, what a verified row costs.

Both decide before the numbers of a step are known, so both look back: a CUDA graph of so many
draft layers has to be chosen before the layers are drafted, and whether packing pays before
the host has waited for the sizes. Deterministic functions of what they are told, so that
tensor-parallel ranks that are told the same decide the same.

Pure Python; knows neither torch nor SGLang.

Legend: D draft layers, s of them drafted, T rows of a target forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class DraftDepth:
    """How many layers the next step drafts.

    Layer d + 1 is worth a draft forward of the whole batch while enough requests are still
    alive behind layer d. ``--speculative-adaptive`` looks back as well, but at accepted drafts
    and for one length of all requests; here each request still ends its own draft, and this only
    cuts layers that next to nobody would use.

    Args:
        choices: Numbers of layers that can be drafted; the largest is D.
        least_alive: Share of the requests that must be alive behind a layer for the next.
        smoothing: Weight of a step in the running means.
    """

    def __init__(
        self, choices: Iterable[int], *, least_alive: float = 0.1, smoothing: float = 0.2
    ) -> None:
        self._choices = sorted(set(choices))
        self._least_alive = least_alive
        self._smoothing = smoothing
        self._alive: dict[int, float] = {}  # share of requests alive behind a layer
        self.steps = self._choices[-1]
        """Layers that the next step drafts."""

    def observe(self, verify_lens: Sequence[int], drafted: int) -> None:
        """Learn from a step that ``drafted`` so many layers: rows of each request, root
        included.
        """
        if not verify_lens:
            return
        for depth in range(1, drafted + 1):
            share = sum(length > depth for length in verify_lens) / len(verify_lens)
            before = self._alive.get(depth, share)
            self._alive[depth] = before + self._smoothing * (share - before)
        for depth in [d for d in self._alive if d > drafted]:
            del self._alive[depth]  # not seen in this step; an old mean would be believed for long
        wanted = 1
        # What is drafted already stays down to half the share, lest the length swings.
        while wanted <= drafted and self._alive[wanted] >= self._least_alive * (
            0.5 if wanted < drafted else 1.0
        ):
            wanted += 1
        self.steps = next((c for c in self._choices if c >= wanted), self._choices[-1])


class Line:
    """y = fixed + slope x through what was observed lately, by least squares.

    Args:
        memory: Weight of an observation after the next one, in (0, 1).
    """

    def __init__(self, memory: float = 0.99) -> None:
        self._memory = memory
        self._sums = [0.0] * 6  # of 1, x, y, x x, x y, y y

    def observe(self, x: float, y: float) -> None:
        """One measurement."""
        new = 1.0, x, y, x * x, x * y, y * y
        self._sums = [s * self._memory + n for s, n in zip(self._sums, new, strict=True)]

    def coefficients(self) -> tuple[float, float]:
        """(fixed, slope); (0, 0) before two different x were seen."""
        n, sx, sy, sxx, sxy, _ = self._sums
        spread = n * sxx - sx * sx
        if spread <= 1e-9 * max(n * sxx, 1.0):
            return 0.0, 0.0
        slope = (n * sxy - sx * sy) / spread
        return (sy - slope * sx) / n, slope

    def slope_error(self) -> float | None:
        """Standard error of the slope; ``None`` before three observations of different x."""
        n, sx, sy, sxx, sxy, syy = self._sums
        fixed, slope = self.coefficients()
        spread = sxx - sx * sx / max(n, 1.0)
        if n <= 2.0 or slope == fixed == 0.0:
            return None
        left = max(syy - fixed * sy - slope * sxy, 0.0)  # squares, of what the line leaves
        return math.sqrt(left / (n - 2.0) / spread)


class PackingRule:
    """Whether packing a verification pays.

    Packed, the host must wait for the sizes before it can lay out and launch the forward, and
    the device idles meanwhile; full width needs no sizes, but forwards every row. Both sides are
    measured on the running server: milliseconds per row (device time of target forwards) and the
    wait (host time from the sizes' arrival to the launch). Before there is anything to go by,
    packing is tried.
    """

    def __init__(self) -> None:
        self._forward = Line()  # ms of a target forward over its rows
        self._wait = 0.0  # ms
        self._waits = 0
        self._decided_on = (0.0, 0.0)  # ms per row, ms of waiting

    def forward_took(self, rows: int, milliseconds: float) -> None:
        """A target forward of T ``rows`` took so long on the device."""
        self._forward.observe(rows, milliseconds)

    def waited(self, milliseconds: float) -> None:
        """The device had nothing to do for so long, because sizes had to reach the host."""
        self._waits += 1
        self._wait += max(0.05, 1 / self._waits) * (milliseconds - self._wait)

    @property
    def measured(self) -> tuple[float, float]:
        """(ms per row, ms of waiting) as known now."""
        return self._forward.coefficients()[1], self._wait

    @property
    def row_ms(self) -> tuple[float, float] | None:
        """Milliseconds per row, and their standard error; ``None``: not known."""
        error = self._forward.slope_error()
        return None if error is None else (self.measured[0], error)

    def decide_on(self, per_row: float, wait: float) -> None:
        """Use these numbers from now on. Ranks that must agree pass the same ones."""
        self._decided_on = per_row, wait

    def pays(self, full_rows: int, packed_rows: float) -> bool:
        """Whether forwarding ``packed_rows`` instead of ``full_rows`` is worth the wait."""
        per_row, wait = self._decided_on
        if per_row == wait == 0.0:
            return True
        return (full_rows - packed_rows) * per_row > wait

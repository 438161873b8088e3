"""What a step costs on this machine: milliseconds over rows, over batches, by draft depth.

numpy only; knows neither torch nor SGLang.

Legend: T rows of a target forward, B requests, d draft layers.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sglang_c2t.plan.survival import rising

#: A seed counts as so many measurements until real ones displace it.
MEMORY = 9


class Curve:
    """Milliseconds over a size, rising: medians of what was measured last, at each size.

    A median because a pause of the machine must not make a size look dear; rising, because a larger
    forward never takes less, so that one odd size cannot become a dead spot or a bargain. Between
    sizes it is interpolated, beyond them drawn on with the slope of the outermost two.

    Args:
        memory: Measurements kept of a size.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._samples: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._clock = 0
        self._fit: tuple[np.ndarray, np.ndarray] | None = None

    def observe(self, size: int, milliseconds: float) -> None:
        """One measurement."""
        self._clock += 1
        self._samples.setdefault(size, deque(maxlen=self._memory)).append(milliseconds)
        self._measured_at[size] = self._clock
        self._fit = None

    def seed(self, points: Mapping[int, float]) -> None:
        """Curves measured before, or by dummy forwards: believed until a size is measured."""
        for size, milliseconds in points.items():
            if size not in self._samples:
                self.observe(size, milliseconds)

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self._samples)

    @property
    def points(self) -> dict[int, float]:
        """The curve at the sizes that were measured."""
        sizes, values = self._fitted()
        return {int(size): float(value) for size, value in zip(sizes, values, strict=True)}

    def __call__(self, size: float) -> float:
        """Milliseconds at ``size``; 0 where nothing was ever measured."""
        sizes, values = self._fitted()
        if len(sizes) == 0:
            return 0.0
        if len(sizes) == 1:
            return float(values[0])
        at = min(max(bisect.bisect_right(sizes.tolist(), size), 1), len(sizes) - 1)
        (x0, x1), (y0, y1) = sizes[at - 1 : at + 1], values[at - 1 : at + 1]
        return max(float(y0 + (y1 - y0) * (size - x0) / (x1 - x0)), 0.0)

    def stale(self, among: Iterable[int], older_than: int) -> int | None:
        """The size whose last measurement is the oldest, if it is that old or there is none."""
        ages = {size: self._clock - self._measured_at.get(size, -older_than) for size in among}
        if not ages:
            return None
        oldest = max(ages, key=lambda size: (ages[size], -size))
        return oldest if ages[oldest] >= older_than else None

    def _fitted(self) -> tuple[np.ndarray, np.ndarray]:
        if self._fit is None:
            sizes = np.array(sorted(self._samples), dtype=np.float64)
            medians = np.array([np.median(self._samples[int(size)]) for size in sizes])
            weights = np.array([float(len(self._samples[int(size)])) for size in sizes])
            self._fit = sizes, rising(medians, weights) if len(sizes) else medians
        return self._fit


class StepCost:
    """Milliseconds of a step: verify(T) + draft(B, d) + rest(B).

    Drafting is a curve over the batch for each depth, because SGLang captures graphs of a few
    depths; a depth that was never run is drawn from the others. The rest is what the host and draft
    extend take, and it grows with the batch.
    """

    def __init__(self) -> None:
        self.verify = Curve()
        self.layer = Curve()
        self.rest = Curve()

    def observe(
        self,
        *,
        rows: int,
        batch: int,
        layers: int,
        verify_ms: float,
        draft_ms: float,
        rest_ms: float,
    ) -> None:
        """A step: ``rows`` T forwarded for ``batch`` B requests behind ``layers`` d forwards."""
        self.verify.observe(rows, verify_ms)
        self.rest.observe(batch, rest_ms)
        if layers:
            self.layer.observe(batch, draft_ms / layers)

    def __call__(self, rows: int, batch: int, layers: int) -> float:
        """Milliseconds of a step."""
        return self.verify(rows) + layers * self.layer(batch) + self.rest(batch)

    def state(self) -> dict[str, Any]:
        """The curves' points, for JSON."""
        return {name: curve.points for name, curve in self._curves.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Seed the curves; ValueError for what are no points of them."""
        for name, curve in self._curves.items():
            points = {int(size): float(ms) for size, ms in dict(state[name]).items()}
            if not all(size > 0 and 0 <= ms < 1e6 for size, ms in points.items()):
                raise ValueError(f"{name} holds what are no sizes and milliseconds")
            curve.seed(points)

    @property
    def _curves(self) -> dict[str, Curve]:
        return {"verify": self.verify, "layer": self.layer, "rest": self.rest}

"""Planner for policies without planning: it drafts all layers and the gate decides the rest."""

from __future__ import annotations

import numpy as np

from sglang_c2t.plan.cost import Curve
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord

#: Measured row counts needed to estimate the cost of a row.
ENOUGH = 4


class FixedPlanner:
    """Always plans full drafts of ``width`` N, and measures the cost of a target row."""

    def __init__(self, max_depth: int, topk: int, width: int) -> None:
        self.max_depth, self.topk, self._width = max_depth, topk, width
        self._verify = Curve()
        self._plans: dict[int, StepPlan] = {}

    def plan(self, batch: BatchView) -> StepPlan:
        """Plan all layers, and rows for the full draft of each request."""
        requests = batch.batch_size
        if requests not in self._plans:
            rows = requests * self._width
            self._plans[requests] = StepPlan(StepKind.FIXED, self.max_depth, self.topk, rows)
        return self._plans[requests]

    def stays_draft_free(self, _batch: BatchView) -> bool:
        """Whether the burst of a planner that served before goes on: no."""
        return False

    def learn(self, record: StepRecord) -> None:
        """Measure the verification."""
        if record.times is not None:
            self._verify.step()
            self._verify.observe(record.times.rows, record.times.verify_ms)

    def full_rows(self, _layers: int) -> int:
        """Return N."""
        return self._width

    @property
    def row_ms(self) -> tuple[float, float] | None:
        """Milliseconds per row of the target, and their standard error; ``None`` if unknown."""
        points = self._verify.points
        if len(points) < ENOUGH:
            return None
        line, covariance = np.polyfit([*points], [*points.values()], 1, cov="unscaled")
        left = np.polyval(line, [*points]) - [*points.values()]
        spread = float((left**2).sum()) / (len(points) - 2)
        return float(line[0]), float(np.sqrt(covariance[0, 0] * spread))

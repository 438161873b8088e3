"""Plans that still hold, and whether uniform steps bring more than planned ones.

Planning takes the host time. A plan is kept for its batch size for a number of steps, which
doubles while the plan computed next is the same.

numpy only; knows neither torch nor SGLang.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np

from sglang_c2t.plan.cost import size_bucket
from sglang_c2t.plan.plan import Plan
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan
from sglang_c2t.plan.survival import Array

#: Steps for which a plan is kept: at first, and at most. A uniform plan is kept for longer: between
#: two runs of it one step is planned, which keeps learning what survives.
PLANNED_STEPS = 1, 32
UNIFORM_STEPS = 16, 128

#: Planned steps before uniform ones are compared with them.
ENOUGH = 8

#: Steps of a kind whose times correct the next estimates.
RATIOS = 65

#: Comparisons after which one counts a third.
REMEMBERED = 128


@dataclass
class Verdict:
    """A plan, the steps it is still kept for, and what it rests on."""

    plan: StepPlan
    steps: int
    left: int
    basis: Hashable


class Verdicts:
    """The plan that holds for each batch size.

    A uniform plan holds for all sizes of a bucket, as requests come and go.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[bool, int], Verdict] = {}

    def next(self, view: BatchView) -> StepPlan | None:
        """The plan of the next step; ``None``: compute one."""
        verdict = self._kept.get((True, size_bucket(view.batch_size)))
        if verdict is None or not view.allows_uniform:
            verdict = self._kept.get((False, view.batch_size))
        if verdict is None or verdict.left <= 0 or verdict.basis != _basis(view):
            return None
        verdict.left -= 1
        return verdict.plan

    def planned(self, batch: int) -> StepPlan | None:
        """The plan that held last for this batch size, uniform ones aside."""
        verdict = self._kept.get((False, batch))
        return None if verdict is None else verdict.plan

    def keep(
        self, view: BatchView, plan: StepPlan, *, taken: int, steps: int | None = None
    ) -> bool:
        """Keep a ``plan`` for the next steps, ``taken`` of which are made already; returns whether
        it is the same as before.

        Args:
            view: The batch it is for.
            plan: What holds from now on.
            taken: Steps that count already.
            steps: For so many; ``None``: for twice as many as before if it is the same.
        """
        uniform = plan.kind is StepKind.UNIFORM
        key = uniform, size_bucket(view.batch_size) if uniform else view.batch_size
        before, (first, most) = self._kept.get(key), UNIFORM_STEPS if uniform else PLANNED_STEPS
        same = before is not None and _same(before.plan, plan)
        if steps is None:
            length = 0 if before is None else before.steps
            steps = min(2 * length, most) if same else max(length // 2, first)
        self._kept[key] = Verdict(plan, steps, steps - taken, _basis(view))
        return same

    def drop_uniform(self, batch: int) -> bool:
        """Let no uniform plan hold for sizes like this; returns whether one did."""
        return self._kept.pop((True, size_bucket(batch)), None) is not None


def _basis(view: BatchView) -> Hashable:
    """The facts that must not change while a plan holds: an eighth more context is a change."""
    return size_bucket(view.context), view.num_constrained, len(view.depths)


def _same(one: StepPlan, other: StepPlan) -> bool:
    if one.kind is StepKind.UNIFORM:
        return one.num_layers == other.num_layers
    return (one.num_layers, one.row_budget) == (other.num_layers, other.row_budget)


@dataclass
class _Bucket:
    """Steps of about as many requests."""

    compared: int = 0

    sums: Array = field(default_factory=lambda: np.zeros((2, 2)))
    """Tokens and milliseconds of planned steps, and of uniform ones in their place; lately."""

    planned: deque[float] = field(default_factory=partial(deque, maxlen=RATIOS))
    """Measured times over predicted ones."""

    uniform: deque[float] = field(default_factory=partial(deque, maxlen=RATIOS))


class Comparison:
    """Tokens a millisecond of planned steps, against uniform ones in their place."""

    def __init__(self) -> None:
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)

    def took(self, batch: int, over_predicted: float, *, uniform: bool) -> None:
        """The time of a step over what was predicted for it."""
        bucket = self._buckets[size_bucket(batch)]
        (bucket.uniform if uniform else bucket.planned).append(over_predicted)

    def add(self, batch: int, plan: Plan, uniform: Plan) -> None:
        """Compare the best ``plan`` of a step with the best ``uniform`` one.

        At the same moment, by the same costs and for the same drafts, because machines have slow
        minutes and requests bad ones. And by how much longer either kind lately took than costs
        say: a plan that is the best of many is one that looks too good.
        """
        bucket = self._buckets[size_bucket(batch)]
        new = np.array([[one.tokens, one.milliseconds] for one in (plan, uniform)])
        kinds = bucket.planned, bucket.uniform or bucket.planned
        new[:, 1] *= [median(ratios) if ratios else 1.0 for ratios in kinds]
        bucket.sums = (1.0 - 1.0 / REMEMBERED) * bucket.sums + new
        bucket.compared += 1

    def rates(self, batch: int) -> tuple[float, float] | None:
        """Tokens a millisecond of planned and of uniform steps; ``None``: too few were compared."""
        bucket = self._buckets[size_bucket(batch)]
        if bucket.compared < ENOUGH:
            return None
        # Of sums, not step by step: a uniform step takes as long where a planned one is short.
        (tokens, took), (uniform_tokens, uniform_took) = bucket.sums.tolist()
        return tokens / took, uniform_tokens / uniform_took

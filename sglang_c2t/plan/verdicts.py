"""Plans that still hold, and the comparison of uniform steps with planned ones. Planning costs host
time. The planner keeps a plan for its batch size for a number of steps, which doubles while the
next plan is the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np

from sglang_c2t.plan.cost import size_bucket
from sglang_c2t.plan.gains import kept_share
from sglang_c2t.plan.plan import Plan
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan
from sglang_c2t.plan.survival import Array

#: Steps for which a plan is kept: at first, and at most. A uniform plan is kept for longer, also
#: through changes of the batch after which it is still the best. Between two runs of it one step is
#: planned, which keeps learning survivals.
PLANNED_STEPS = 1, 32
UNIFORM_STEPS = 16, 128

#: Planned steps before uniform ones are compared with them, and draft-free ones: how many tokens
#: these yield is certain.
ENOUGH = 8
ENOUGH_DRAFT_FREE = 2

#: Steps of a kind whose times correct the next estimates.
RATIOS = 65

#: With fewer uniform steps, the missing ones count as having the usual ratio of planned steps. That
#: is too high: the best of many plans is seldom as fast as predicted.
FEW = 9

#: Comparisons, and steps, after which an earlier comparison has a third of its weight.
REMEMBERED = 32
REMEMBERED_STEPS = 1024

#: Tokens per millisecond of planned steps and of uniform ones.
Rates = tuple[float, float]


@dataclass
class Verdict:
    """A plan, the steps for which it is still kept, and the facts it depends on."""

    plan: StepPlan
    steps: int
    left: int
    basis: Hashable


class Verdicts:
    """The plan that holds for each batch size. A uniform plan holds for all sizes of a bucket,
    because requests come and go.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[bool, int], Verdict] = {}

    def next(self, view: BatchView) -> StepPlan | None:
        """Return the plan of the next step; ``None`` if it must be computed."""
        verdict = self._uniform(view) or self._kept.get((False, view.batch_size))
        if verdict is None or verdict.left <= 0 or verdict.basis != _basis(view):
            return None
        verdict.left -= 1
        return verdict.plan

    def outdated(self, view: BatchView) -> StepPlan | None:
        """Return the uniform plan that would hold, had the batch not changed."""
        verdict = self._uniform(view)
        if verdict is None or verdict.left <= 0 or verdict.basis == _basis(view):
            return None
        return verdict.plan

    def renew(self, view: BatchView) -> StepPlan | None:
        """Keep the outdated uniform plan for the rest of its steps; returns the next step's."""
        if verdict := self._uniform(view):
            verdict.basis = _basis(view)
        return self.next(view)

    def doubt(self, batch: int) -> None:
        """Look at the uniform plan sooner, because a planned step accepted more than expected."""
        if verdict := self._kept.get((True, batch_bucket(batch))):
            verdict.steps = max(verdict.steps // 4, UNIFORM_STEPS[0])
            verdict.left = min(verdict.left, verdict.steps)

    def stays_draft_free(self, view: BatchView) -> bool:
        """Whether a draft-free plan holds for another step."""
        verdict = self._uniform(view)
        return verdict is not None and verdict.plan.num_layers == 0 and verdict.left > 0

    def _uniform(self, view: BatchView) -> Verdict | None:
        verdict = self._kept.get((True, batch_bucket(view.batch_size)))
        allowed = verdict is not None and allows(view, verdict.plan.num_layers)
        return verdict if allowed else None

    def planned(self, batch: int) -> StepPlan | None:
        """Return the last non-uniform plan for this batch size."""
        verdict = self._kept.get((False, batch))
        return None if verdict is None else verdict.plan

    def keep(
        self, view: BatchView, plan: StepPlan, *, taken: int, steps: int | None = None
    ) -> bool:
        """Keep a ``plan`` for the next steps; returns whether it is the same as before.

        Args:
            view: The batch it is for.
            plan: The new plan.
            taken: Steps of it that are already made.
            steps: Steps to keep it; ``None``: twice as many as before if it is the same.
        """
        uniform = plan.kind is StepKind.UNIFORM
        key = uniform, batch_bucket(view.batch_size) if uniform else view.batch_size
        before, (first, most) = self._kept.get(key), UNIFORM_STEPS if uniform else PLANNED_STEPS
        same = before is not None and _same(before.plan, plan)
        if steps is None:
            length = 0 if before is None else before.steps
            steps = min(2 * length, most) if same else max(length // 2, first)
        self._kept[key] = Verdict(plan, steps, steps - taken, _basis(view))
        return same

    def drop_uniform(self, batch: int) -> bool:
        """Drop the uniform plan for sizes of this bucket; returns whether there was one."""
        return self._kept.pop((True, batch_bucket(batch)), None) is not None


def batch_bucket(requests: int) -> int:
    """Round to the nearest size with three significant bits: requests come and go, and few sizes
    are soon compared.
    """
    return size_bucket(requests, bits=3)


def allows(view: BatchView, layers: int) -> bool:
    """Whether a uniform step of so many ``layers`` may follow."""
    return view.allows_uniform if layers else view.allows_draft_free


def _basis(view: BatchView) -> Hashable:
    """Return facts that invalidate a plan when they change, such as an eighth more context."""
    return size_bucket(view.context), view.num_constrained, len(view.depths)


def _same(one: StepPlan, other: StepPlan) -> bool:
    if one.kind is StepKind.UNIFORM:
        return one.num_layers == other.num_layers
    return (one.num_layers, one.row_budget) == (other.num_layers, other.row_budget)


@dataclass
class _Bucket:
    """Steps of one size bucket, and one kind of uniform steps."""

    compared: int = 0

    step: int = 0
    """Step of the last comparison."""

    sums: Array = field(default_factory=lambda: np.zeros((2, 2)))
    """Decayed sums of tokens and milliseconds of planned steps, and of uniform ones."""

    planned: deque[float] = field(default_factory=partial(deque, maxlen=RATIOS))
    """Ratios of measured to predicted time."""

    uniform: deque[float] = field(default_factory=partial(deque, maxlen=RATIOS))


class Comparison:
    """Tokens per millisecond of planned steps and of uniform steps on the same drafts. Draft-free
    steps are compared apart from other uniform ones.
    """

    def __init__(self) -> None:
        self._buckets: defaultdict[tuple[int, bool], _Bucket] = defaultdict(_Bucket)

    def took(self, batch: int, over_predicted: float, *, uniform: bool, draft_free: bool) -> None:
        """Add the ratio of a step's time to its predicted time."""
        for of_draft_free in (False, True):
            bucket = self._buckets[batch_bucket(batch), of_draft_free]
            if not uniform:
                bucket.planned.append(over_predicted)
            elif draft_free == of_draft_free:
                bucket.uniform.append(over_predicted)

    def add(self, step: int, batch: int, plan: Plan, uniform: Plan) -> None:
        """Compare the best ``plan`` of a step with a ``uniform`` one. Both use the same moment,
        costs and drafts, because machines and requests have slow phases. The recent ratio of
        measured to predicted time corrects each kind, because the best of many plans has an
        optimistic estimate.
        """
        bucket = self._buckets[batch_bucket(batch), uniform.layers == 0]
        new = np.array([[one.tokens, one.milliseconds] for one in (plan, uniform)])
        usual = median(bucket.planned) if bucket.planned else 1.0
        missing = [usual] * (FEW - len(bucket.uniform))
        new[:, 1] *= usual, median([*bucket.uniform, *missing])
        remembered = ENOUGH if missing else REMEMBERED
        kept = kept_share(step - bucket.step, remembered, REMEMBERED_STEPS)
        bucket.sums, bucket.step = kept * bucket.sums + new, step
        bucket.compared += 1

    def few(self, batch: int, *, draft_free: bool) -> bool:
        """Whether few uniform steps of about B requests were taken."""
        return len(self._buckets[batch_bucket(batch), draft_free].uniform) < FEW

    def rates(self, batch: int, *, draft_free: bool = False) -> Rates | None:
        """Return the rates of planned and of uniform steps; ``None`` if too few were compared."""
        bucket = self._buckets[batch_bucket(batch), draft_free]
        if bucket.compared < (ENOUGH_DRAFT_FREE if draft_free else ENOUGH):
            return None
        # The ratio of sums: a uniform step takes as long where a planned one is short.
        (tokens, took), (uniform_tokens, uniform_took) = bucket.sums.tolist()
        return tokens / took, uniform_tokens / uniform_took

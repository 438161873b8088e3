"""The layers and rows of a step with the most tokens per millisecond.

    maximise over d and T:  (B + the sum of the T - B best survivals among the first d layers)
                            / cost(T, B, d)

Survival falls along a path, so the T - B best drafts of a batch leave no gaps in chains or trees.
Rows are padded to tiers, so the cost is a staircase and the ratio has many peaks. The planner
compares every depth and every tier. T = B at d = 0 is a step without drafting.

Legend: B requests, D layers, d of them drafted, T rows of the target's forward, R of them verified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.survival import Array

T = TypeVar("T", float, Array)

#: Power of a step's time over the limit by which it counts as longer. At 8 a step 5 % over the
#: limit must yield half as many tokens again to be chosen; none of twice the limit ever is.
STEEP = 8

#: Share by which rates of equal plans may differ in floating point.
TIE = 1e-9

#: Returns [d, n] milliseconds of steps with T of [n] rows, B requests and each of d layer counts.
Cost = Callable[[NDArray[np.int64], int, Sequence[int]], Array]


class Plan(NamedTuple):
    """Layers and rows of a step, and the expected tokens and time."""

    layers: int
    """d: draft layers; 0: no drafting."""

    rows: int
    """R: rows the target verifies over the batch, roots included."""

    tokens: float
    """Expected tokens of the step."""

    milliseconds: float
    """Expected milliseconds of the step."""

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.milliseconds


class Plans(NamedTuple):
    """Plans for each of d layer counts and each of n tiers: [d, n]."""

    depths: Sequence[int]
    """[d] layer counts, increasing."""

    tiers: NDArray[np.int64]
    """[n] rows forwarded, increasing."""

    rows: NDArray[np.int64]
    """Verified rows: as many as are drafted and the tier holds."""

    tokens: Array
    """Expected tokens."""

    milliseconds: Array
    """Expected; infinite in tiers above the first that holds all rows, which would be padding."""

    def best_of_each_depth(self) -> list[Plan]:
        """Return the plan with the highest rate for each number of layers."""
        best = (self.tokens / self.milliseconds).argmax(axis=1)
        return [self._plan(depth, tier) for depth, tier in enumerate(best.tolist())]

    def best_that_fills(self, tiers: Collection[int]) -> tuple[int, Plan] | None:
        """Return one of ``tiers`` and its best plan; ``None`` if no plan runs in one of them. It
        compares only plans that fill the tier as far as any plan does.
        """
        among = np.array([tier in tiers for tier in self.tiers.tolist()])
        fills = (self.rows == self.rows.max(axis=0)) & among
        rate = np.where(fills, self.tokens / self.milliseconds, 0.0)
        depth, tier = divmod(int(rate.argmax()), len(self.tiers))
        if rate[depth, tier] == 0.0:
            return None
        return int(self.tiers[tier]), self._plan(depth, tier)

    def like(self, layers: int, rows: int) -> Plan | None:
        """Return the plan with these layers and rows; ``None`` if there is none."""
        if layers not in self.depths:
            return None
        depth = self.depths.index(layers)
        found = np.flatnonzero((self.rows[depth] == rows) & np.isfinite(self.milliseconds[depth]))
        return self._plan(depth, int(found[0])) if len(found) else None

    def _plan(self, depth: int, tier: int) -> Plan:
        at = depth, tier
        expected = float(self.tokens[at]), float(self.milliseconds[at])
        return Plan(self.depths[depth], int(self.rows[at]), *expected)


def weighed(milliseconds: T, limit: float | None) -> T:
    """Return the ``milliseconds`` [...] of steps as plans count them: longer, the further they are
    over the ``limit``. A request without accepted drafts waits one step per token, so a limit of
    the step is one of its time per output token.
    """
    if limit is None:
        return milliseconds
    return milliseconds * np.maximum(milliseconds / limit, 1.0) ** STEEP


def best_of(plans: Sequence[Plan]) -> Plan:
    """Return the plan with the highest rate; of equal ones the first."""
    found = plans[0]
    for plan in plans[1:]:
        if plan.rate > found.rate * (1 + TIE):
            found = plan
    return found


def every_plan(
    survival: Array,
    batch: int,
    cost: Cost,
    *,
    depths: Sequence[int],
    tiers: Sequence[int],
) -> Plans:
    """Compute the plans of all depths and tiers.

    Args:
        survival: [S, D] of S sampled requests that represent the batch: the survival of each draft,
            decreasing along a row. Of trees [S, D, C] with C nodes per layer, 0 for missing nodes.
        batch: B.
        cost: Milliseconds; positive.
        depths: Layer counts with graphs; 0 is among them if a step may skip drafting.
        tiers: Useful row counts, increasing; none below one root per request.

    Raises:
        ValueError: No tier holds the batch.
    """
    roomy = np.array([tier for tier in tiers if tier >= batch])
    if not len(roomy):
        raise ValueError(f"{batch} requests, and no tier of more than {max(tiers, default=0)} rows")
    depths = sorted(depths)
    milliseconds = np.array(cost(roomy, batch, depths), dtype=np.float64)
    drafts = np.empty(milliseconds.shape, dtype=np.int64)
    tokens = np.empty(milliseconds.shape)
    for i, layers in enumerate(depths):
        # A tree's layer may hold fewer than C nodes.
        all_drafts = round(np.count_nonzero(survival[:, :layers]) * batch / len(survival))
        drafts[i] = np.minimum(roomy - batch, all_drafts)
        tokens[i] = batch + expected_gains(survival[:, :layers], batch, drafts[i])
        milliseconds[i, 1 + int(np.searchsorted(roomy, batch + all_drafts)) :] = np.inf
    return Plans(depths, roomy, batch + drafts, tokens, milliseconds)


def expected_gains(survival: Array, batch: int, drafts: NDArray[np.int64]) -> Array:
    """Return [n]: tokens gained by the ``drafts`` [n] best drafts of the batch, up to B d of them.
    ``survival`` [S, d] represents B requests: each number stands for B / S drafts. The same holds
    for [S, d, C] and B d C.
    """
    share = batch / len(survival)
    best = survival.flatten()
    best.sort()
    gained = np.zeros(best.size + 1)
    np.cumsum(best[::-1], out=gained[1:])
    return np.asarray(np.interp(drafts / share, np.arange(gained.size), gained)) * share


def expected_by_layer(survival: Array, ranked: Array, batch: int, drafts: int) -> Array:
    """Return [d]: the accepted ones of the ``drafts`` of the batch that are best by ``ranked``,
    expected by ``survival``, both [S, d, ...].
    """
    values, best = survival.ravel(), np.zeros(survival.size)
    count = min(round(drafts * len(survival) / batch), best.size)
    if count:
        chosen = np.argpartition(-ranked.ravel(), count - 1)[:count]
        best[chosen] = values[chosen]
    each = best.reshape(len(survival), survival.shape[1], -1)
    return np.asarray(each.sum(axis=(0, 2))) * batch / len(survival)

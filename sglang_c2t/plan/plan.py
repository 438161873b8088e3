"""The layers and rows of a step that bring most tokens a millisecond.

    maximise over d and T:  (B + the sum of the T - B best survivals among the first d layers)
                            / cost(T, B, d)

Survival falls along a path, so the T - B best of a batch leave no gaps in chains, nor ancestors in
trees. The cost is a staircase (rows are padded to tiers), so the ratio has many peaks: every depth
and every tier is compared. T = B at d = 0 is a step without drafting.

numpy only; knows neither torch nor SGLang.

Legend: B requests, D layers, d of them drafted, T rows of the target's forward, R of them verified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.survival import Array

#: [d, n] milliseconds of steps with T of [n] rows, at B requests and each of d numbers of layers.
Cost = Callable[[NDArray[np.int64], int, Sequence[int]], Array]


class Plan(NamedTuple):
    """Layers and rows to choose from, and what they are expected to bring."""

    layers: int
    """d: draft layers; 0: no drafting."""

    rows: int
    """R: rows the target verifies over the batch, roots included."""

    tokens: float
    """Expected of the step."""

    milliseconds: float
    """Expected of the step."""

    @property
    def rate(self) -> float:
        """Tokens a millisecond."""
        return self.tokens / self.milliseconds


class Plans(NamedTuple):
    """Plans with each of d numbers of layers and each of n tiers: [d, n]."""

    depths: Sequence[int]
    """[d] numbers of layers, rising."""

    tiers: NDArray[np.int64]
    """[n] rows forwarded, rising."""

    rows: NDArray[np.int64]
    """Verified: as many as are drafted and the tier holds."""

    tokens: Array
    """Expected."""

    milliseconds: Array
    """Expected; infinite in tiers above the first that holds all, which would be padding."""

    def best_of_each_depth(self) -> list[Plan]:
        """The plan with the highest rate for each number of layers."""
        best = (self.tokens / self.milliseconds).argmax(axis=1)
        return [self._plan(depth, tier) for depth, tier in enumerate(best.tolist())]

    def best_that_fills(self, tiers: Collection[int]) -> tuple[int, Plan] | None:
        """One of ``tiers``, and the plan with the highest rate of those that fill it as far as any
        does. ``None``: no plan runs in one of them.
        """
        among = np.array([tier in tiers for tier in self.tiers.tolist()])
        fills = (self.rows == self.rows.max(axis=0)) & among
        rate = np.where(fills, self.tokens / self.milliseconds, 0.0)
        depth, tier = divmod(int(rate.argmax()), len(self.tiers))
        if rate[depth, tier] == 0.0:
            return None
        return int(self.tiers[tier]), self._plan(depth, tier)

    def like(self, layers: int, rows: int) -> Plan | None:
        """The plan with these layers and rows; ``None`` if there is none."""
        if layers not in self.depths:
            return None
        depth = self.depths.index(layers)
        found = np.flatnonzero((self.rows[depth] == rows) & np.isfinite(self.milliseconds[depth]))
        return self._plan(depth, int(found[0])) if len(found) else None

    def _plan(self, depth: int, tier: int) -> Plan:
        at = depth, tier
        expected = float(self.tokens[at]), float(self.milliseconds[at])
        return Plan(self.depths[depth], int(self.rows[at]), *expected)


def best_plan(
    survival: Array,
    batch: int,
    cost: Cost,
    *,
    depths: Sequence[int],
    tiers: Sequence[int],
) -> Plan:
    """The plan with the highest rate; of equal ones that with fewest layers, then rows.

    As :func:`every_plan`.
    """
    plans = every_plan(survival, batch, cost, depths=depths, tiers=tiers)
    return best_of(plans.best_of_each_depth())


def best_of(plans: Sequence[Plan]) -> Plan:
    """The one with the highest rate, and of equal ones the first."""
    found = plans[0]
    for plan in plans[1:]:
        if plan.rate > found.rate * (1 + 1e-9):
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
    """All there are to choose from.

    Args:
        survival: [S, D], of S sampled requests that stand for the batch: what each drafted token
            is worth, falling along a row. Of trees [S, D, C], C nodes a layer, 0 where fewer are.
        batch: B.
        cost: Milliseconds; positive.
        depths: Numbers of layers there are graphs for, 0 among them if a step may go without.
        tiers: Row counts that are worth their padding, rising; none holds less than a root each.

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
        # Of trees a layer may hold fewer nodes than there is room for.
        all_drafts = round(np.count_nonzero(survival[:, :layers]) * batch / len(survival))
        drafts[i] = np.minimum(roomy - batch, all_drafts)
        tokens[i] = batch + expected_gains(survival[:, :layers], batch, drafts[i])
        milliseconds[i, 1 + int(np.searchsorted(roomy, batch + all_drafts)) :] = np.inf
    return Plans(depths, roomy, batch + drafts, tokens, milliseconds)


def expected_gains(survival: Array, batch: int, drafts: NDArray[np.int64]) -> Array:
    """[n]: tokens gained by the ``drafts`` [n] best of the batch, up to B d of them.

    ``survival`` [S, d] stands for B requests, each of its numbers for B / S drafts. The same for
    [S, d, C], and B d C.
    """
    share = batch / len(survival)
    best = survival.flatten()
    best.sort()
    gained = np.zeros(best.size + 1)
    np.cumsum(best[::-1], out=gained[1:])
    return np.asarray(np.interp(drafts / share, np.arange(gained.size), gained)) * share

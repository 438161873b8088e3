"""How much to draft and to verify in the next step: what brings most tokens a millisecond.

    maximise over d and T:  (B + the sum of the T - B best survivals among the first d layers)
                            / cost(T, B, d)

Survival falls along a path, so the T - B best of a batch leave no gaps in chains, nor ancestors in
trees. The cost is a staircase (rows are padded to tiers), so the ratio has many peaks: every depth
and every tier is looked at. T = B at d = 0 is a step without drafting.

numpy only; knows neither torch nor SGLang.

Legend: B requests, D layers, d of them drafted, T rows of the target's forward, R of them verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.survival import Array

#: [d, n] milliseconds of steps with T of [n] rows, at B requests and each of d numbers of layers.
Cost = Callable[[NDArray[np.int64], int, Sequence[int]], Array]


class Plan(NamedTuple):
    """What a step does."""

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


def best_plan(
    survival: Array,
    batch: int,
    cost: Cost,
    *,
    depths: Sequence[int],
    tiers: Sequence[int],
) -> Plan:
    """The plan with the highest rate; of equal ones that with fewest layers, then rows.

    Args:
        survival: [S, D], of S sampled requests that stand for the batch: what each drafted token
            is worth, falling along a row. Of trees [S, D, W], W nodes a layer, 0 where fewer are.
        batch: B.
        cost: Milliseconds; positive.
        depths: Numbers of layers there are graphs for, 0 among them if a step may go without.
        tiers: Row counts that are worth their padding, rising; none holds less than a root each.

    Raises:
        ValueError: No tier holds the batch.
    """
    return best_of(best_of_each_depth(survival, batch, cost, depths=depths, tiers=tiers))


def best_of(plans: Sequence[Plan]) -> Plan:
    """The one with the highest rate, and of equal ones the first."""
    found = plans[0]
    for plan in plans[1:]:
        if plan.rate > found.rate * (1 + 1e-9):
            found = plan
    return found


def best_of_each_depth(
    survival: Array,
    batch: int,
    cost: Cost,
    *,
    depths: Sequence[int],
    tiers: Sequence[int],
) -> list[Plan]:
    """The best plan with so many layers, for each of ``depths``, rising; as :func:`best_plan`."""
    roomy = np.array([tier for tier in tiers if tier >= batch])
    if not len(roomy):
        raise ValueError(f"{batch} requests, and no tier of more than {max(tiers, default=0)} rows")
    depths = sorted(depths)
    milliseconds = cost(roomy, batch, depths)
    plans = []
    for layers, ms in zip(depths, milliseconds, strict=True):
        all_drafts = batch * survival[0, :layers].size
        # In the first tier that holds all; larger ones may be faster, and are not run in.
        fitting = 1 + int(np.searchsorted(roomy, batch + all_drafts))
        drafts = np.minimum(roomy[:fitting] - batch, all_drafts)
        tokens = batch + expected_gains(survival[:, :layers], batch, drafts)
        best = (tokens / ms[:fitting]).argmax()
        rows = batch + int(drafts[best])
        plans.append(Plan(layers, rows, float(tokens[best]), float(ms[best])))
    return plans


def expected_gains(survival: Array, batch: int, drafts: NDArray[np.int64]) -> Array:
    """[n]: tokens gained by the ``drafts`` [n] best of the batch, up to B d of them.

    ``survival`` [S, d] stands for B requests, each of its numbers for B / S drafts. The same for
    [S, d, W], and B d W.
    """
    share = batch / len(survival)
    best = survival.flatten()
    best.sort()
    gained = np.zeros(best.size + 1)
    np.cumsum(best[::-1], out=gained[1:])
    return np.asarray(np.interp(drafts / share, np.arange(gained.size), gained)) * share

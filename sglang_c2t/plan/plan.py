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

from sglang_c2t.plan.survival import Array


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
    cost: Callable[[Array, int, int], Array],
    *,
    depths: Sequence[int],
    tiers: Sequence[int],
) -> Plan:
    """The plan with the highest rate; of equal ones that with fewest layers, then rows.

    Args:
        survival: [S, D], of S sampled requests that stand for the batch: what each drafted token
            is worth, falling along a row. Of trees [S, D, W], W nodes a layer, 0 where fewer are.
        batch: B.
        cost: Milliseconds for each of some T rows, at B requests and d layers; positive.
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
    cost: Callable[[Array, int, int], Array],
    *,
    depths: Sequence[int],
    tiers: Sequence[int],
) -> list[Plan]:
    """The best plan with so many layers, for each of ``depths``, rising; as :func:`best_plan`."""
    roomy = np.array([tier for tier in tiers if tier >= batch])
    if not len(roomy):
        raise ValueError(f"{batch} requests, and no tier of more than {max(tiers, default=0)} rows")
    plans = []
    for layers in sorted(depths):
        gains = expected_gains(survival[:, :layers], batch)  # [1 + drafts]
        rows = np.minimum(roomy, batch + len(gains) - 1)
        tokens, milliseconds = batch + gains[rows - batch], cost(roomy, batch, layers)
        best = int(np.argmax(tokens / milliseconds))
        plans.append(Plan(layers, int(rows[best]), float(tokens[best]), float(milliseconds[best])))
    return plans


def expected_gains(survival: Array, batch: int) -> Array:
    """[1 + B d]: tokens gained by the n best drafts of the batch, n = 0 .. B d.

    ``survival`` [S, d] stands for B requests, each of its numbers for B / S drafts. The same for
    [S, d, W], and B d W.
    """
    samples = len(survival)
    drafts = batch * survival[0].size
    if drafts == 0:
        return np.zeros(1)
    best = np.sort(survival, axis=None)[::-1]
    gained = np.concatenate(([0.0], np.cumsum(best) * (batch / samples)))
    at = np.arange(drafts + 1) * (samples / batch)
    return np.asarray(np.interp(at, np.arange(len(gained)), gained))

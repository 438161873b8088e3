"""Plain steps: every request drafts and verifies as much as the others, and no gate is asked.

Choosing, judging drafts and sharing rows out takes the host time. Where rows are cheap, or costs
are a staircase on which some fixed length happens to stand well, that is more than it brings.

numpy only; knows neither torch nor SGLang.

Legend: B requests, D layers, d of them drafted, S samples of drafts, C confidences of a tree's
layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sglang_c2t.plan.cost import about
from sglang_c2t.plan.plan import Cost, Plan, best_of
from sglang_c2t.plan.survival import Array

#: Plain steps behind one that was planned. That one keeps learning what survives, and whether they
#: still pay.
RUN = 16

#: Plain steps that are tried to learn what they cost.
TRIAL = 3

#: Planned steps with a batch before plain ones are compared with them.
ENOUGH = 8

#: Steps of a kind by whose times the next are judged.
LATELY = 17

#: First drafts, and planned steps, that stand for the traffic.
TYPICAL = 128


def best_alike(survival: Array, batch: int, cost: Callable[[int, int, int], float]) -> Plan:
    """The plan with the highest rate among those that verify as many drafts of each request.

    Args:
        survival: [D] of a typical draft.
        batch: B.
        cost: Gives milliseconds of (rows, B, layers).
    """
    tokens = batch * np.cumsum(np.concatenate(([1.0], survival)))
    plans = []
    for drafts, expected in enumerate(tokens.tolist()):
        layers, rows = max(drafts, 1), batch * (1 + drafts)  # the first comes with draft extend
        plans.append(Plan(layers, rows, expected, cost(rows, batch, layers)))
    return best_of(plans)


def best_alike_trees(
    survival: Array, batch: int, cost: Cost, *, whole: Callable[[int], int], width: int
) -> Plan:
    """The plan with the highest rate among those that verify as many nodes of each request's tree,
    a whole path at least: SGLang's bookkeeping takes it for granted.

    Args:
        survival: [S, D, C] of typical trees, 0 where is no node. The most likely are verified.
        batch: B.
        cost: Gives milliseconds.
        whole: Gives the nodes of a whole tree of d layers, its root included.
        width: W of the trees.
    """
    depths = range(1, survival.shape[1] + 1)
    drafts = 1 + np.arange(whole(depths[-1]) - 1)  # of a request
    rows = batch * (1 + drafts)
    milliseconds = cost(rows, batch, depths)
    expected = np.zeros(milliseconds.shape)
    for i, layers in enumerate(depths):
        best = -np.sort(-survival[:, :layers].reshape(len(survival), -1), axis=1)
        gained = np.cumsum(best.mean(axis=0))[: whole(layers) - 1]
        expected[i, layers - 1 : len(gained)] = batch * (1.0 + gained[layers - 1 :])
    i, j = divmod(int((expected / milliseconds).argmax()), len(rows))
    at = float(expected[i, j]), float(milliseconds[i, j])
    return Plan(depths[i], int(rows[j]), *at, width)


class _Run(NamedTuple):
    """Plain steps to come."""

    plan: Plan
    batch: int
    """For which the plan was made."""

    left: int
    """How many."""


class PlainSteps:
    """Which of the next steps are plain, and what they are compared with."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}  # by batch
        self._planned: dict[int, tuple[int, float, float]] = {}  # steps, gain, ms, by batch
        self._times: dict[tuple[int, bool], deque[float]] = {}  # over predicted, by batch and kind
        self._firsts: Array | None = None

    def begin(self, batch: int, plan: Plan, steps: int) -> None:
        """The next so many steps of about as many requests are plain."""
        self._runs[about(batch)] = _Run(plan, batch, steps)

    def next(self, batch: int) -> Plan | None:
        """The plan of the next step, if it is plain.

        Requests come and go, and each number of them has a run of its own, that goes on when they
        are as many again: a planned step whenever one has ended would be one of every few.
        """
        run = self._runs.get(about(batch))
        if run is None or run.left == 0:
            return None
        self._runs[about(batch)] = run._replace(left=run.left - 1)
        return run.plan._replace(rows=run.plan.rows // run.batch * batch)

    def took(self, batch: int, over_predicted: float, *, plain: bool) -> None:
        """The time of a step over what was predicted for it."""
        times = self._times.setdefault((about(batch), plain), deque(maxlen=LATELY))
        times.append(over_predicted)

    def planned(self, batch: int, plan: Plan, alike: Plan) -> None:
        """A step that was planned, and the plain one that would have been in its place.

        They are compared at the same moment, by the same costs, because machines have slow minutes;
        and by how much longer either kind lately took than these say: a plan that is chosen among
        many is one that looks too good.
        """
        milliseconds = plan.milliseconds * self._slower(batch, plain=False)
        alike_rate = alike.rate / self._slower(batch, plain=True)
        steps, gain, spent = self._planned.get(about(batch), (0, 0.0, 0.0))
        kept = 1.0 - 1.0 / TYPICAL
        gain = kept * gain + plan.tokens - alike_rate * milliseconds
        self._planned[about(batch)] = steps + 1, gain, kept * spent + milliseconds

    def gain(self, batch: int) -> float | None:
        """Tokens a millisecond that planned steps lately brought more than plain ones would have;
        ``None``: there were too few.
        """
        steps, gain, spent = self._planned.get(about(batch), (0, 0.0, 1.0))
        return gain / spent if steps >= ENOUGH else None

    def _slower(self, batch: int, *, plain: bool) -> float:
        """Median of times over predicted ones; of planned steps while no plain ones were made."""
        kinds = (plain, False)
        times = next((t for kind in kinds if (t := self._times.get((about(batch), kind)))), None)
        return float(np.median(times)) if times else 1.0

    def typical(self, first: Array) -> Array:
        """First layers of drafts lately, ``first`` [S, ...] among them."""
        known = first if self._firsts is None else np.concatenate((self._firsts, first))
        self._firsts = known[-TYPICAL:]
        return self._firsts

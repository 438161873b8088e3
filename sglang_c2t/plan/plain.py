"""Plain steps: every request drafts and verifies as much as the others, and no gate is asked.

Choosing, judging drafts and sharing rows out takes the host time. Where rows are cheap, or costs
are a staircase on which some fixed length happens to stand well, that is more than it brings.

numpy only; knows neither torch nor SGLang.

Legend: B requests, D layers, d of them drafted, S samples of drafts, C confidences of a tree's
layer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from sglang_c2t.plan.cost import about
from sglang_c2t.plan.plan import Cost, Plan
from sglang_c2t.plan.survival import Array

#: Plain steps behind one that was planned. That one keeps learning what survives, and whether they
#: still pay.
RUN = 16

#: Plain steps that are tried to learn what they cost.
TRIAL = 3

#: Planned steps with a batch before plain ones are compared with them.
ENOUGH = 8

#: Steps of a kind by whose times the next are judged.
LATELY = 65

#: First drafts that stand for the traffic.
TYPICAL = 256

#: Planned steps after which what one brought counts a third.
REMEMBERED = 128


def best_alike(
    survival: Array, batch: int, cost: Cost, *, whole: Callable[[int], int], width: int = 1
) -> Plan:
    """The plan with the highest rate among those that verify as many drafts of each request: of
    trees a whole path at least, which SGLang's bookkeeping takes for granted; of chains, those of
    width 1, all that are drafted, or none.

    Args:
        survival: [S, D, C] of typical drafts, 0 where is none. The most likely are verified.
        batch: B.
        cost: Gives milliseconds.
        whole: Gives the rows of a whole draft of d layers, its root included.
        width: W of the drafts.
    """
    depths = range(1, survival.shape[1] + 1)
    drafts = np.arange(whole(depths[-1]))  # of a request
    rows = batch * (1 + drafts)
    milliseconds = cost(rows, batch, depths)
    expected = np.zeros(milliseconds.shape)
    for i, layers in enumerate(depths):
        gained = _gains(survival[:, :layers])[: whole(layers)]
        expected[i, layers : len(gained)] = batch * (1.0 + gained[layers:])
    if width == 1:
        expected[0, 0] = batch
    i, j = divmod(int((expected / milliseconds).argmax()), len(rows))
    at = float(expected[i, j]), float(milliseconds[i, j])
    return Plan(depths[i], int(rows[j]), *at, width)


def tokens_alike(plan: Plan, survival: Array, batch: int) -> float:
    """Tokens expected of a plain step of this ``plan`` for drafts of a ``survival`` [S, D, C]."""
    gained = _gains(survival[:, : plan.layers])
    return batch * (1.0 + float(gained[plan.rows // batch - 1]))


def _gains(survival: Array) -> Array:
    """[1 + d * C]: tokens that none, one, two, ... of the most likely drafts of each sample
    [S, d, C] bring on average.
    """
    best = -np.sort(-survival.reshape(len(survival), -1), axis=1)
    return np.concatenate(([0.0], np.cumsum(best.mean(axis=0))))


class _Run(NamedTuple):
    """Plain steps to come."""

    plan: Plan
    batch: int
    """For which the plan was made."""

    left: int
    """How many."""


@dataclass
class _Load:
    """What is known of about so many requests."""

    run: _Run | None = None
    compared: int = 0
    """Planned steps."""

    sums: Array = field(default_factory=lambda: np.zeros((2, 2)))
    """Tokens and milliseconds of these, and of plain ones in their place; lately."""

    planned: deque[float] = field(default_factory=partial(deque, maxlen=LATELY))
    """Times over predicted ones."""

    plain: deque[float] = field(default_factory=partial(deque, maxlen=LATELY))

    @property
    def slower(self) -> Array:
        """[2]: medians of the times, planned and plain; without plain ones, planned ones."""
        kinds = self.planned, self.plain or self.planned
        return np.array([np.median(times) if times else 1.0 for times in kinds])


class PlainSteps:
    """Which of the next steps are plain, and what they are compared with."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _Load] = defaultdict(_Load)
        self._firsts: Array | None = None
        self._usual: dict[int, tuple[int, Plan]] = {}  # planned steps it is still good for, by B

    def begin(self, batch: int, plan: Plan, steps: int) -> None:
        """The next so many steps of about as many requests are plain."""
        self._load(batch).run = _Run(plan, batch, steps)

    def next(self, batch: int) -> Plan | None:
        """The plan of the next step, if it is plain.

        Requests come and go, and each number of them has a run of its own, that goes on when they
        are as many again: a planned step whenever one has ended would be one of every few.
        """
        load = self._load(batch)
        if load.run is None or load.run.left == 0:
            return None
        load.run = load.run._replace(left=load.run.left - 1)
        plan = load.run.plan
        return plan._replace(rows=plan.rows // load.run.batch * batch)

    def took(self, batch: int, over_predicted: float, *, plain: bool) -> None:
        """The time of a step over what was predicted for it."""
        load = self._load(batch)
        (load.plain if plain else load.planned).append(over_predicted)

    def planned(self, batch: int, plan: Plan, alike: Plan) -> None:
        """A step that was planned, and the plain one that would have been in its place.

        They are compared at the same moment, by the same costs and for the same drafts, because
        machines have slow minutes and requests bad ones, and those are when plain steps would be
        begun; and by how much longer either kind lately took than these costs say: a plan that is
        chosen among many is one that looks too good.
        """
        load = self._load(batch)
        new = np.array([[one.tokens, one.milliseconds] for one in (plan, alike)])
        new[:, 1] *= load.slower
        load.sums = (1.0 - 1.0 / REMEMBERED) * load.sums + new
        load.compared += 1

    def gain(self, batch: int) -> float | None:
        """Tokens a millisecond that planned steps lately brought more than plain ones would have;
        ``None``: there were too few.
        """
        load = self._load(batch)
        if load.compared < ENOUGH:
            return None
        # Not step by step: a plain one takes its time where a planned one is short as well.
        (tokens, took), (alike, took_alike) = load.sums.tolist()
        return float(tokens / took - alike / took_alike)

    def _load(self, batch: int) -> _Load:
        return self._loads[about(batch)]

    def usual(self, batch: int, first: Array, best: Callable[[Array], Plan]) -> Plan:
        """The plain step that is ``best`` for first layers of drafts lately, ``first`` [S, ...]
        among them; looked for again once in so many planned steps of a batch.
        """
        known = first if self._firsts is None else np.concatenate((self._firsts, first))
        self._firsts = known[-TYPICAL:]
        left, plan = self._usual.get(batch, (0, None))
        if plan is None or left == 0:
            left, plan = ENOUGH, best(self._firsts)
        self._usual[batch] = left - 1, plan
        return plan

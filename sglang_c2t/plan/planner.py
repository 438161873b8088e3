"""Decides each step from what the steps before have shown, and learns from it in turn.

    choose   how many layers to draft, before any is drafted
    settle   how many rows to verify, once they are drafted
    learn    which of the verified drafts survived; what the step took

numpy only; knows neither torch nor SGLang.

Legend: B requests, S samples of their drafts, D layers, d of them drafted, W the width of the
drafts (rows of a request that a layer forwards, 1 in chains), R rows verified, T rows of the
forward.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from sglang_c2t.plan.acceptance import Acceptance, Estimator
from sglang_c2t.plan.cost import StepCost
from sglang_c2t.plan.forecast import Continuations
from sglang_c2t.plan.plain import RUN, TRIAL, PlainSteps, best_alike, tokens_alike
from sglang_c2t.plan.plan import Cost, Plan, Plans, best_of, best_plan, every_plan
from sglang_c2t.plan.survival import Array, Numbers

#: Chains that stand for a batch: more say no more, and cost the host time.
SAMPLES = 256

#: One request is verified to full depth in so many steps, or deep drafts would have no labels.
WHOLE_EVERY = 32

#: Share of the time that may be lost by steps that are made only to learn from.
EXPLORING = 0.005

#: Steps whose time a young server may lose besides, for row counts that were only measured before
#: it served: whatever else the machine did then is in them.
YOUNG = 10.0

#: However dear they look, all layers are drafted once in so many steps, plain steps are tried whose
#: price is not known, and in a young server at least whenever its age has doubled: a price that
#: nobody looks at again would stay what a bad moment made it.
EXPLORE_EVERY = 500
EXPLORE_FIRST = 16

#: Steps without so many layers before a look at them, however cheap it seems: what they are worth
#: is soon known, and a look costs more than it seems to, as those that seem cheap are taken.
LOOK_EVERY = 16

#: Share of its time that a step with some row count may seem to lose, and may yet be the best once
#: that count is measured.
NEARLY = 0.1

#: Measurements of draft layers and of verification before a plan relies on them, where nothing was
#: measured before it served; the first ones of a process are slow.
ENOUGH = 5

#: Outcomes are learnt from when a tenth of all are new, and at least every so many steps: a step
#: costs the host as much as sixteen do.
LEARN_SHARE = 0.1
LEARN_EVERY = 16

#: Planned steps whose first drafts stand for the traffic where other loads are told of.
RECENT = 16


class Choice(NamedTuple):
    """What a step does, and why."""

    plan: Plan

    reason: str
    """``plan``; ``unknown``: costs are not known yet; ``explore``: to see layers; ``plain``: every
    draft alike, and no gate looks at any.
    """

    whole: int | None = None
    """Of B, the request whose draft is verified to its end, to learn from it."""


class Planner:
    """The planner of a server.

    Args:
        max_depth: D.
        survival: What confidences are worth.
        all_layers: Always draft D, and plan rows only.
    """

    samples = SAMPLES
    """Drafts of requests that stand for a batch."""

    widths: Sequence[int] = (1,)
    """W of the drafts there are to choose from, rising."""

    def __init__(self, max_depth: int, survival: Estimator, *, all_layers: bool = False) -> None:
        self.max_depth = max_depth
        self.survival = survival
        self.free = self._acceptance(survival)
        """Acceptance in requests that leave the target's distribution as it is."""
        self.constrained = self._acceptance(copy.deepcopy(survival))
        """Acceptance in requests that change the target's distribution."""
        self.cost = StepCost(self.widest)
        # Whether they are constrained, W and d of a step's drafts.
        self._outcomes: list[tuple[tuple[bool, int, int], tuple[Numbers, ...]]] = []
        self._seen = self._new = 0  # drafts of free requests, learnt from and not yet
        self._depths = [max_depth] if all_layers else list(range(1, max_depth + 1))
        self._all_layers = all_layers
        self._plain = PlainSteps()
        self._as_planned = False
        """Whether the step in progress is one by which planned steps are known."""
        self._alike: Plan | None = None
        """The best plain step in its place, if it may be one."""
        self._context = 0
        """Tokens before the drafts of the step in progress."""
        self._steps = 0
        self._spent = 0.0  # milliseconds of all steps
        self._lost = 0.0  # milliseconds, by steps made to learn
        self._credit = YOUNG
        self._turn = 0
        # Steps that last drafted so many layers or more, by width.
        self._drafted_at = {width: [0] * (max_depth + 1) for width in self.widths}
        self._tried_plain_at = 0  # step
        self.predicted_ms = self.measured_ms = 0.0
        """Of all steps that had a prediction, together."""
        self._measures: int | None = None
        """Rows that an exploring step verifies to learn what they cost."""
        self._errors: deque[float] = deque(maxlen=512)
        self._firsts: deque[Array] = deque(maxlen=RECENT)  # of planned steps
        self._batch = 1  # B of the last one

    def plain_step(self, batch: int) -> Choice | None:
        """The next step if it is plain, as those before it and B are; else :meth:`choose` it."""
        plan = self._plain.next(batch)
        if plan is None:
            return None
        self._begin()
        return Choice(plan, "plain")

    def choose(
        self,
        first: Array,
        batch: int,
        tiers: Sequence[int],
        depths: Sequence[int] | None = None,
        *,
        context: int = 0,
        widths: Collection[int] | None = None,
        plain: bool = False,
        constrained: Numbers | None = None,
    ) -> Choice:
        """How deep and how wide to draft, and about how many rows to verify.

        Args:
            first: [S] confidences of first drafts, those of the batch or of some like it; of trees
                [S, C], see :meth:`survivals`.
            batch: B.
            tiers: Numbers of rows to choose from, rising; the last holds whole drafts of all B.
            depths: Numbers of layers that can be drafted; ``None``: any up to D.
            context: Tokens before the drafts, of all B.
            widths: Widths that can be; ``None``: any there is.
            plain: Whether steps behind this one may be plain.
            constrained: [S] bool: drafts of constrained requests, see
                :mod:`~sglang_c2t.plan.acceptance`; ``None``: none is.
        """
        self._begin()
        self._context, self._batch = context, batch
        if len(free := first if constrained is None else first[~constrained]):
            self._firsts.append(free)
        whole = (self._steps // WHOLE_EVERY) % batch if self._steps % WHOLE_EVERY == 0 else None
        depths = [d for d in self._depths if depths is None or d in depths]
        if self._unknown:
            return Choice(self._everything(batch), "unknown", whole)
        behind = cache(partial(self._behind, first, self.samples, constrained=constrained))
        alike = self._alike_for(first, behind, batch) if plain and not self._all_layers else None
        self._alike = alike
        gain = None if alike is None else self._plain.gain(batch)
        every = [
            every_plan(
                behind(width), batch, self._cost(width), depths=drafted, tiers=tiers, width=width
            )
            for width, drafted in self._kinds(widths, depths)
        ]
        plans = [plan for of_width in every for plan in of_width.best_of_each_depth()]
        plan = best = best_of(plans)
        if alike is not None and gain is not None and gain < 0.0:
            best = best_of([plan, alike])  # by which looks are priced
        # Layers that are not drafted may have got better, and rows that are not verified cheaper.
        if look := self._rows_to_measure(every, best):
            self._measures, again = look
            return Choice(again, "explore", whole)
        if others := [p for p in plans if not _within(p, plan) and self._unseen(p)]:
            due = [p for p in others if p.layers == depths[-1] and self._due(self._last_whole(p))]
            other = due[0] if due else others[self._turn % len(others)]
            if due or self._affordable(other, best):
                self._turn += 1
                self._drafted(other.width, other.layers)
                return Choice(other, "explore", whole)
        # Behind the looks, or a young server would make plain steps of what it has not measured.
        if alike is not None and gain is not None:
            self._begin_plain(alike, batch, gain)
        self._as_planned = whole is None
        return Choice(plan, "plan", whole)

    def settle(
        self,
        confidences: Array,
        tiers: Sequence[int],
        width: int = 1,
        constrained: Numbers | None = None,
    ) -> Plan:
        """How many rows to verify, now that the ``confidences`` [B, d] of all drafts of this
        ``width`` are known; ``constrained`` [B] as for :meth:`choose`.
        """
        batch, layers = confidences.shape[:2]
        most = batch * self.full_rows(layers, width)
        if self._unknown:
            # Rows of every number are measured once, from all to none.
            rows = tiers[-1 - self._steps % min(len(tiers), ENOUGH) * (len(tiers) // ENOUGH)]
            return Plan(layers, min(max(rows, batch), most), float(batch), 1.0, width)
        if self._measures is not None:
            rows = min(self._measures, most)
            took = self.cost.one(rows, batch, layers, context=self._context, width=width)
            return Plan(layers, rows, float(batch), took, width)
        survival, cost = self.survivals(confidences, constrained), self._cost(width)
        plan = best_plan(survival, batch, cost, depths=[layers], tiers=tiers, width=width)
        if self._as_planned and self._alike is not None:
            self._plain.planned(batch, plan, self._alike)
        return plan

    @property
    def widest(self) -> int:
        """The largest W."""
        return self.widths[-1]

    def full_rows(self, layers: int, width: int = 1) -> int:
        """Rows of a whole draft of d ``layers``, root included."""
        return 1 + layers

    def survivals(self, confidences: Array, constrained: Numbers | None = None) -> Array:
        """[S, d, ...]: survival of drafts with ``confidences`` [S, d, ...], of which some are of
        ``constrained`` [S] requests.
        """
        survival = self.free.survivals(confidences)
        if constrained is not None and constrained.any():
            survival[constrained] = self.constrained.survivals(confidences[constrained])
        return survival

    def learn_drafts(self, *outcome: Numbers, constrained: bool = False) -> None:
        """Learn from a step, now or together with others.

        Args:
            outcome: Confidences [B, d] of its drafts, how many [B] were verified and how many [B]
                accepted.
            constrained: Whether all of these requests are.
        """
        self._learn_soon(1, outcome[0].shape[1], outcome, constrained=constrained)

    def catch_up(self) -> None:
        """Learn from all outcomes that wait for others."""
        steps, self._outcomes = self._outcomes, []
        for kind in sorted({kind for kind, _ in steps}):
            constrained, width, layers = kind
            together = [outcome for of, outcome in steps if of == kind]
            acceptance = self.constrained if constrained else self.free
            outcomes = map(np.concatenate, zip(*together, strict=True))
            self._learn(acceptance, width, layers, *outcomes)
        self._seen, self._new = self._seen + self._new, 0
        self.refresh()

    def refresh(self) -> None:
        """What drafts are worth has changed."""
        self.free.refresh()
        self.constrained.refresh()

    def learn_time(
        self,
        choice: Plan,
        *,
        rows: int,
        batch: int,
        verify_ms: float,
        draft_ms: float,
        step_ms: float,
        context: int = 0,
        plain: bool = False,
    ) -> None:
        """Learn from what a step took: ``rows`` T were forwarded as its ``choice`` asked for,
        behind ``context`` tokens.
        """
        rest = max(step_ms - verify_ms - draft_ms, 0.0)
        kind: Any = {"context": context, "width": choice.width, "plain": plain}
        if self.cost.rest.known:
            predicted = self.cost.one(rows, batch, choice.layers, **kind)
            self._errors.append(predicted / step_ms)
            self._plain.took(batch, step_ms / predicted, plain=plain)
            self.predicted_ms += predicted
            self.measured_ms += step_ms
        self.cost.observe(
            rows=rows, batch=batch, layers=choice.layers, verify_ms=verify_ms, draft_ms=draft_ms,
            rest_ms=rest, **kind,
        )  # fmt: skip
        self._spent += step_ms

    @property
    def predicted_over_measured(self) -> float | None:
        """Median of the time predicted for a step over the time it took; ``None``: no steps."""
        return float(np.median(self._errors)) if self._errors else None

    def outlook(self, tiers: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
        """What drafts like the last ones would bring at other loads: of each number of requests B
        in ``tiers``, which gives its numbers of rows, the best plan of each depth and width.

        Prices beyond what was measured go on as :class:`~sglang_c2t.plan.cost.Curve` says.
        """
        self.catch_up()
        if self._unknown or not self._firsts:
            return []
        recent = np.concatenate(self._firsts)
        first = recent[np.linspace(0, len(recent) - 1, min(len(recent), self.samples)).astype(int)]
        each = self._context / self._batch
        found = []
        for width, drafted in self._kinds(None, self._depths):
            survival = self._behind(first, self.samples, width)
            for batch, rows in tiers.items():
                cost = partial(self.cost, context=round(each * batch), width=width)
                plans = every_plan(survival, batch, cost, depths=drafted, tiers=rows, width=width)
                told = (plan._asdict() for plan in plans.best_of_each_depth())
                found += [{"requests": batch, **plan} for plan in told]
        return found

    def calibration_errors(self) -> list[float]:
        """Of each depth, how far predicted survivals were from what became of the drafts: the
        expected calibration error of predictions made before their outcomes were learnt from.
        """
        self.catch_up()
        return self.free.predictions.errors()

    def report(self) -> dict[str, Any]:
        """What was learnt, for people: curves, reliability, prediction error."""
        self.catch_up()
        return {
            "steps": self._steps,
            "cost_ms": self.cost.state(),
            "predicted_over_measured": self.predicted_over_measured,
            "predicted_over_measured_quartiles": self._quartiles(),
            "confidence": self.free.grades.told(),
            "constrained": self.constrained.grades.told(),
            "calibration_error": self.calibration_errors(),
            "reliability": self.free.predictions.told(),
        }

    def state(self) -> dict[str, Any]:
        """What a server that starts again goes on from, for JSON."""
        self.catch_up()
        return {
            "survival": self.survival.state(),
            "cost": self.cost.state(),
            "credit": self._credit,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` said; ValueError where it does not fit."""
        self.survival.restore(state["survival"])
        self.refresh()
        self.cost.restore(state["cost"])
        # Who goes on is not young again: looks it has paid for would be paid for at each start.
        credit = float(state.get("credit", 0.0))
        if not 0.0 <= credit <= YOUNG:
            raise ValueError(f"{credit} is no number of steps from 0 to {YOUNG:g}")
        self._credit = credit

    def forget(self) -> None:
        """Start anew, costs included."""
        self.reset()
        self.cost = StepCost(self.widest)
        self._credit = YOUNG

    def reset(self) -> None:
        """Forget everything but the costs, which are the machine's."""
        self._outcomes.clear()
        self._seen = self._new = 0
        self.free.reset()
        self.constrained.reset()
        self._plain = PlainSteps()

    def _quartiles(self) -> list[float]:
        """Of what :attr:`predicted_over_measured` is the median of."""
        return list(np.quantile(self._errors, (0.25, 0.75)).tolist()) if self._errors else []

    @property
    def _unknown(self) -> bool:
        """Whether too little was measured to plan by."""
        needed = [self.cost.verify, *([self.cost.layer] if self.max_depth > 1 else ())]
        return any(not curve.seeded and curve.measurements < ENOUGH for curve in needed)

    def _begin(self) -> None:
        """Another step."""
        self._steps += 1
        self._as_planned, self._alike, self._measures = False, None, None

    def _kinds(
        self, widths: Collection[int] | None, depths: list[int]
    ) -> list[tuple[int, list[int]]]:
        """Widths of drafts and numbers of layers to choose from. A draft of one layer is the same
        at any width, and counts as one of the narrowest.
        """
        narrowest, *others = [w for w in self.widths if widths is None or w in widths]
        deeper = [d for d in depths if d > 1]
        return [(narrowest, depths), *((width, deeper) for width in others if deeper)]

    def _behind(
        self, first: Array, most: int, width: int, constrained: Numbers | None = None
    ) -> Array:
        """Survivals of about ``most`` drafts of a ``width`` whose ``first`` layers are these, some
        of them ``constrained``.
        """
        if constrained is None or not constrained.any():
            return self.free.behind(first, most, width)
        # Each draft goes on in as many ways as if all were of one class.
        ways = max(most // len(first), 1)
        of_each = ((self.free, first[~constrained]), (self.constrained, first[constrained]))
        return np.concatenate(
            [of.behind(mine, ways * len(mine), width) for of, mine in of_each if len(mine)]
        )

    def _alike_of(self, survival: Array, width: int) -> Array:
        """[S, D, C]: ``survival`` of plain drafts of a ``width``, by that of planned ones."""
        return survival[:, :, None]

    def _rows_to_measure(self, every: Sequence[Plans], best: Plan) -> tuple[int, Plan] | None:
        """A row count whose price may not hold any more, and a plan with it, if one is worth
        leaving the ``best`` plan for: the count that would be best. Once that is known again it is
        another's turn, of which the last one costs most and is paid for most seldom. Counts that
        nobody has measured, whose kernels may be better than those around them, are worth it where
        they are nearly best as they are.
        """
        verify, tiers = self.cost.verify, every[0].tiers.tolist()
        for untried, most in ((verify.stale, np.inf), (verify.unknown, NEARLY)):
            if not (again := set(untried(tiers))):
                continue
            looks = [look for plans in every if (look := plans.best_that_fills(again))]
            found = max(looks, key=lambda look: look[1].rate, default=None)
            if found is None or _lost(found[1], best) > most * found[1].milliseconds:
                continue
            if self._credited(found[1], best) or self._affordable(found[1], best):
                return found
        return None

    def _unseen(self, plan: Plan) -> bool:
        """Whether no step has drafted so many layers, so wide, for a while."""
        return self._steps - self._drafted_at[plan.width][plan.layers] >= LOOK_EVERY

    def _last_whole(self, plan: Plan) -> int:
        """The step that last drafted all layers as wide as a ``plan`` does."""
        return self._drafted_at[plan.width][-1]

    def _drafted(self, width: int, layers: int) -> None:
        """The step in progress, or the last one, drafts so many, so wide."""
        self._drafted_at[width][: layers + 1] = [self._steps] * (layers + 1)
        for of_width in self._drafted_at.values():
            of_width[1] = self._steps  # the first layer is the same

    def _due(self, last: int) -> bool:
        """Whether it is time for a look, the last one at that step, whatever it costs."""
        return self._steps - last >= min(max(last, EXPLORE_FIRST), EXPLORE_EVERY)

    def _affordable(self, other: Plan, plan: Plan, steps: int = 1) -> bool:
        """Whether so many steps may follow another ``plan`` to learn from it. That loses what the
        rates differ by; what was not lost in time is not saved up.
        """
        lost = steps * _lost(other, plan)
        self._lost = max(self._lost, EXPLORING * self._spent - lost)
        if self._lost + lost > EXPLORING * self._spent:
            return False
        self._lost += lost
        return True

    def _credited(self, other: Plan, plan: Plan) -> bool:
        """Whether it may, as the server is young."""
        lost = _lost(other, plan) / other.milliseconds
        if lost > self._credit:
            return False
        self._credit -= lost
        return True

    def _alike_for(self, first: Array, behind: Callable[[int], Array], batch: int) -> Plan:
        """The plain step that would be in place of this one, whose drafts begin as ``first`` and
        go on as ``behind`` says of each width.
        """
        plan = self._plain.usual(batch, first, partial(self._best_alike, batch))
        survival = self._alike_of(behind(plan.width), plan.width)
        took = self.cost.one(
            plan.rows, batch, plan.layers, context=self._context, width=plan.width, plain=True
        )
        return plan._replace(tokens=tokens_alike(plan, survival, batch), milliseconds=took)

    def _best_alike(self, batch: int, first: Array) -> Plan:
        """The best plain step for drafts that begin as ``first``."""
        return best_of([self._best_alike_of(width, batch, first) for width in self.widths])

    def _best_alike_of(self, width: int, batch: int, first: Array) -> Plan:
        survival = self._alike_of(self._behind(first, len(first), width), width)
        cost = partial(self.cost, context=self._context, width=width, plain=True)
        whole = partial(self._whole_alike, width)
        return best_alike(survival, batch, cost, whole=whole, width=width)

    def _whole_alike(self, width: int, layers: int) -> int:
        """Rows of a whole plain draft: a chain, where layers are one row wide."""
        return 1 + layers if width == 1 else self.full_rows(layers, width)

    def _cost(self, width: int) -> Cost:
        """Of the step in progress, with drafts of a ``width``."""
        return partial(self.cost, context=self._context, width=width)

    def _begin_plain(self, alike: Plan, batch: int, gain: float) -> None:
        """Make the steps behind this one plain where that brings more than the ``gain`` of planned
        ones, or a few to see what they cost: looks that lose less would take all of the allowance
        before these ever can, so that they have their turn whatever they cost.
        """
        if gain < 0.0:
            self._plain.begin(batch, alike, RUN)
        elif not self.cost.plain_measured(batch, alike.width):
            instead = alike._replace(tokens=alike.tokens + gain * alike.milliseconds)
            if self._due(self._tried_plain_at) or self._affordable(alike, instead, TRIAL):
                self._tried_plain_at = self._steps
                self._plain.begin(batch, alike, TRIAL)

    def _everything(self, batch: int) -> Plan:
        rows = batch * self.full_rows(self.max_depth, self.widest)
        return Plan(self.max_depth, rows, float(batch), 1.0, self.widest)

    def _acceptance(self, survival: Estimator) -> Acceptance:
        """An empty :class:`Acceptance` for a class of requests."""
        return Acceptance(
            survival,
            self.max_depth,
            partial(self._survivals_by, survival),
            lambda: {width: self._nothing_seen(width) for width in self.widths},
        )

    def _survivals_by(self, survival: Any, confidences: Array) -> Array:
        """:meth:`survivals` of one class."""
        return np.asarray(survival.of_chains(confidences))

    def _nothing_seen(self, width: int) -> Continuations:
        return Continuations(self.max_depth)

    def _learn_soon(
        self, width: int, layers: int, outcome: tuple[Numbers, ...], *, constrained: bool
    ) -> None:
        """Learn from the ``outcome`` of a step, or keep it until there are more."""
        self._outcomes.append(((constrained, width, layers), outcome))
        if not constrained:
            self._drafted(width, layers)
            self._new += len(outcome[0])
        young = self._new >= LEARN_SHARE * self._seen
        if young or len(self._outcomes) >= LEARN_EVERY or self.survival.by_steps:
            self.catch_up()

    def _learn(self, of: Acceptance, width: int, layers: int, *outcome: Numbers) -> None:
        """Learn from steps of d ``layers`` as told to :meth:`learn_drafts`."""
        confidences, num_drafts, num_correct = outcome
        of.drafted(width, confidences)
        depths = np.broadcast_to(1 + np.arange(layers), confidences.shape)
        verified = depths <= num_drafts[:, None]
        survived = (depths <= num_correct[:, None])[verified]
        least = np.minimum.accumulate(confidences, axis=1)[verified]
        predicted = of.survivals(confidences)[verified]
        of.grade(depths[verified], least, predicted, survived)
        of.survival.learn(confidences, num_drafts, num_correct)


def _within(other: Plan, plan: Plan) -> bool:
    """Whether who drafts as the ``plan`` says drafts all of the ``other`` as well."""
    alike = other.width == plan.width or other.layers == 1
    return alike and other.layers <= plan.layers


def _lost(other: Plan, plan: Plan) -> float:
    """Milliseconds that a step of the ``other`` plan takes longer for its tokens."""
    return max(other.milliseconds * (1.0 - other.rate / plan.rate), 0.0)

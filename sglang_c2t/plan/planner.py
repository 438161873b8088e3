"""The planner: plans each step from the outcomes of earlier ones and learns from it.

It computes a plan from the outcomes that have arrived and keeps it while it holds
(``verdicts.py``). Exploration steps leave the plan to learn (``explore.py``).

Legend: B requests, S samples of their drafts, D layers, d of them drafted, C confidences of a
tree's layer, R rows verified, T rows of the forward.
"""

from __future__ import annotations

import bisect
import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sglang_c2t.plan.acceptance import Acceptance
from sglang_c2t.plan.cost import StepCost
from sglang_c2t.plan.explore import COLD_START_BUDGET, DISTORTED, NEARLY, Exploration
from sglang_c2t.plan.gains import Gains, gained
from sglang_c2t.plan.plan import (
    Plan,
    Plans,
    best_of,
    every_plan,
    expected_by_layer,
    weighed,
)
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord, StepTimes
from sglang_c2t.plan.survival import Array, Numbers, OneSlope, Survival
from sglang_c2t.plan.verdicts import Comparison, Verdicts

#: Steps between two full drafts of one request; without them deep drafts would have no labels.
FULL_EVERY = 32

#: Uniform steps tried to learn their cost.
TRIAL = 3

#: Measurements of draft layers and of verification before a plan relies on them, if nothing was
#: measured before serving. The first ones of a process are slow.
ENOUGH = 5

#: The planner learns once a tenth of all outcomes is new, and at least every so many steps. On the
#: host, learning from one step costs as much as from sixteen.
LEARN_SHARE = 0.1
LEARN_EVERY = 16

#: Standard deviations by which a step's accepted drafts exceed the expected ones, after which the
#: next planned step comes sooner.
SURPRISE = 1.0

#: Times its predicted time from which a step counts as a pause of the machine. It teaches no costs,
#: unless it is at least the third in a row.
PAUSE = 4.0
PAUSES_IN_A_ROW = 3

#: Share of the best rate that the current plan may lack before another replaces it.
INERTIA = 0.02

#: Share by which planned steps must seem faster than uniform ones: the best of many plans seems
#: faster than it is, and what drafts gain by less is not worth their longer steps.
LEAD = 0.02


class _Rival(NamedTuple):
    """A uniform plan, and the rates of it and of planned steps."""

    plan: Plan
    planned_rate: float
    rate: float

    @property
    def wins(self) -> bool:
        """Whether it replaces planned steps."""
        return self.rate >= self.planned_rate * (1.0 - LEAD)


class _Choice(NamedTuple):
    """All plans for a step, the best one, and the uniform plans that were compared enough."""

    forecast: Array
    """[S, D, ...]: survivals of drafts that represent the batch."""

    survival: Array
    """The same, with the gains of the last steps."""

    plans: Plans
    plan: Plan
    rivals: list[_Rival]

    @property
    def uniform(self) -> _Rival | None:
        """The uniform plan that replaces planned steps, if one does."""
        won = [rival for rival in self.rivals if rival.wins]
        return max(won, key=lambda rival: rival.rate / rival.planned_rate, default=None)


class Planner:
    """The planner of chains.

    Args:
        max_depth: D.
        survival: Estimates the survival of a draft from its confidence.
        all_layers: Always draft D layers, and plan rows only.
    """

    samples = 256
    """Sampled drafts that represent a batch: more add no accuracy and cost host time."""

    topk = 1

    tpot_ms: float | None = None
    """Milliseconds per output token that steps should keep; plans over it count as longer."""

    def __init__(
        self, max_depth: int, survival: Survival | OneSlope, *, all_layers: bool = False
    ) -> None:
        self.max_depth = max_depth
        self.survival = survival
        self.free = self._acceptance(survival)
        """Acceptance in requests that keep the target's distribution."""
        self.constrained = self._acceptance(copy.deepcopy(survival))
        """Acceptance in requests that change the target's distribution."""
        self._all_layers = all_layers
        self._outcomes: list[tuple[tuple[bool, int], tuple[Numbers, ...]]] = []
        self._seen = self._new = 0  # drafts of free requests: learnt from, and waiting
        self._last = 1, 0  # requests of the last step, and their tokens of context
        self._steps = 0
        self.predicted_ms = self.measured_ms = 0.0
        """Sums over all steps with a prediction."""
        self._errors: deque[float] = deque(maxlen=512)
        self._pauses = 0  # pauses in a row, up to the last step
        self._full_at = 0  # step that last verified a full draft for its labels
        self._forget_costs()
        self._forget_verdicts()

    def plan(self, batch: BatchView) -> StepPlan:
        """Plan the next step before it drafts: layers and rows."""
        self._count_step()
        plan = self._verdicts.next(batch) or self._computed(batch)
        if plan.kind is StepKind.UNIFORM:
            rows = batch.batch_size * self.full_rows(plan.num_layers)
            return plan if plan.row_budget == rows else _resized(plan, rows)
        if self._steps - self._full_at < FULL_EVERY:
            return plan
        self._full_at = self._steps
        return replace(plan, full_draft_of=(self._steps // FULL_EVERY) % batch.batch_size)

    def stays_draft_free(self, batch: BatchView) -> bool:
        """Whether another draft-free step follows the next one, which counts as planned. Asked
        instead of :meth:`plan` during a burst of draft-free steps, whose requests cannot draft
        until its end.
        """
        self._count_step()
        plan = self._verdicts.next(batch)
        if plan is None and self._verdicts.outdated(batch) and not self._unmeasured:
            plan = self._renewed(self._weighed_up(batch), batch)
        return plan is not None and self._verdicts.stays_draft_free(batch)

    def learn(self, record: StepRecord) -> None:
        """Learn from a step, now or together with later ones."""
        if record.plan.kind is StepKind.EXPLORE:
            self._explore.arrived()
        if record.times is not None:
            self._learn_times(record, record.times)
        if record.num_correct is not None and record.plan.expected_drafts is not None:
            self._learn_gains(record, record.num_correct, np.array(record.plan.expected_drafts))
        for of_constrained, acceptance in ((False, self.free), (True, self.constrained)):
            if outcome := record.of_class(constrained=of_constrained):
                acceptance.firsts.append(self._first_layers(outcome))
                kind = of_constrained, record.plan.num_layers
                self._outcomes.append((kind, outcome))
                if not of_constrained:
                    self._explore.drafted(record.plan.num_layers)
                    self._new += len(outcome[0])
        cold = self._new >= max(LEARN_SHARE * self._seen, 1)
        if cold or len(self._outcomes) >= LEARN_EVERY or self.survival.by_steps:
            self.catch_up()

    def full_rows(self, layers: int) -> int:
        """Return the rows of a full draft of d ``layers``, root included."""
        return 1 + layers

    def survivals(self, confidences: Array) -> Array:
        """[S, d, ...]: survival of free requests' drafts with ``confidences`` [S, d, ...]."""
        return self.free.survivals(confidences)

    def catch_up(self) -> None:
        """Learn from all waiting outcomes."""
        steps, self._outcomes = self._outcomes, []
        for kind in sorted({kind for kind, _ in steps}):
            constrained, layers = kind
            together = [outcome for of, outcome in steps if of == kind]
            acceptance = self.constrained if constrained else self.free
            outcomes = map(np.concatenate, zip(*together, strict=True))
            self._learn_outcomes(acceptance, layers, *outcomes)
        if steps:
            self.free.refresh()
            self.constrained.refresh()
        self._seen, self._new = self._seen + self._new, 0

    # -- planning --------------------------------------------------------------------------

    def _count_step(self) -> None:
        self._steps += 1
        self._explore.step = self._steps

    def _renewed(self, choice: _Choice, view: BatchView) -> StepPlan | None:
        """Return the uniform plan that held before the batch changed, if it is still the best."""
        outdated, best = self._verdicts.outdated(view), choice.uniform
        if outdated is None or best is None or best.plan.layers != outdated.num_layers:
            return None
        return self._verdicts.renew(view)

    def _computed(self, view: BatchView) -> StepPlan:
        """Compute the plan of this step, which may hold for the next ones too."""
        if self._unmeasured:
            self._last = view.batch_size, view.context
            return self._unmeasured_step(view)
        choice = self._weighed_up(view)
        if held := self._renewed(choice, view):
            return held
        if not self._explore.waits and (explored := self._explored(choice, view)):
            return explored
        made = self._step(StepKind.PLANNED, choice.plan, choice)
        same = self._verdicts.keep(view, made, taken=1)
        # After exploration: during a cold start uniform steps would use unmeasured costs.
        if choice.rivals:
            same = self._hold_uniform(choice, view) and same
        self._explore.confirmed(same)
        return made

    def _weighed_up(self, view: BatchView) -> _Choice:
        """Compare all plans for this step."""
        batch = self._last = view.batch_size, view.context
        forecast = self._expected(view)
        survival = gained(forecast, self._gains.of_layers(constrained=view.num_constrained > 0))
        plans = every_plan(
            survival,
            batch[0],
            lambda *sizes: weighed(self.cost(*sizes, context=view.context), self.tpot_ms),
            depths=view.depths[-1:] if self._all_layers else view.depths,
            tiers=view.row_counts,
        )
        plan = self._inert(best_of(plans.best_of_each_depth()), plans, view)
        rivals = []
        for other in () if self._all_layers else self._uniform(survival, view):
            self._comparison.add(self._steps, batch[0], plan, other)
            rates = self._comparison.rates(batch[0], draft_free=other.layers == 0)
            rivals += [] if rates is None else [_Rival(other, *rates)]
        return _Choice(forecast, survival, plans, plan, rivals)

    def _explored(self, choice: _Choice, view: BatchView) -> StepPlan | None:
        """Return an exploration step, or the first of several uniform ones that are tried."""
        faster = [rival.plan for rival in choice.rivals if rival.rate > rival.planned_rate]
        best = best_of([choice.plan, *faster])
        if look := self._explore.row_count(self.cost.verify, choice.plans, best):
            rows, other = look
            most = view.batch_size * self.full_rows(other.layers)
            return self._step(StepKind.EXPLORE, other._replace(rows=min(rows, most)), choice)
        if not self._all_layers and (tried := self._tried(choice, view, best)):
            made = self._step(StepKind.UNIFORM, tried, choice)
            steps = TRIAL if tried.layers else self._burst
            self._verdicts.keep(view, made, taken=1, steps=steps)
            return made
        deeper = self._explore.layers(choice.plans.best_of_each_depth(), choice.plan, best)
        return self._step(StepKind.EXPLORE, deeper, choice) if deeper else None

    def _hold_uniform(self, choice: _Choice, view: BatchView) -> bool:
        """Make the next steps uniform if that has the higher rate; returns whether the decision is
        unchanged.
        """
        if choice.uniform is None:
            return not self._verdicts.drop_uniform(view.batch_size)
        made = self._step(StepKind.UNIFORM, choice.uniform.plan, choice)
        return self._verdicts.keep(view, made, taken=0)

    def _step(self, kind: StepKind, plan: Plan, choice: _Choice) -> StepPlan:
        """Return a step with a ``plan``, of which it expects what was forecast."""
        batch, layers, rows = self._last[0], plan.layers, plan.rows
        both = choice.forecast[:, :layers], choice.survival[:, :layers]
        drafts = tuple(expected_by_layer(*both, batch, rows - batch).tolist()) if layers else None
        return StepPlan(
            kind, layers, self.topk, rows, expected_ms=plan.milliseconds, expected_drafts=drafts
        )

    def _unmeasured_step(self, view: BatchView) -> StepPlan:
        """Return a step that measures costs: row counts in turn, from all rows to none."""
        tiers, layers = view.row_counts, view.depths[-1]
        rows = tiers[-1 - self._steps % min(len(tiers), ENOUGH) * (len(tiers) // ENOUGH)]
        most = view.batch_size * self.full_rows(layers)
        rows = min(max(rows, view.batch_size), most)
        return StepPlan(StepKind.UNMEASURED, layers, self.topk, rows)

    def _inert(self, best: Plan, plans: Plans, view: BatchView) -> Plan:
        """Return the plan that held for this batch size if its rate is near that of ``best``."""
        held = self._verdicts.planned(view.batch_size)
        again = held and plans.like(held.num_layers, held.row_budget)
        return again if again and again.rate >= (1.0 - INERTIA) * best.rate else best

    def _expected(self, view: BatchView) -> Array:
        """Return [S, D, ...]: survivals of drafts that represent the batch."""
        batch, constrained = view.batch_size, view.num_constrained
        classes = (self.free, batch - constrained), (self.constrained, constrained)
        found = [of.expected(max(self.samples * n // batch, 1)) for of, n in classes if n > 0]
        return np.concatenate(found)

    def _uniform(self, survival: Array, view: BatchView) -> list[Plan]:
        """Return the best uniform plan for drafts of this ``survival`` [S, D, ...], and that of
        draft-free steps, as far as they may follow and are measured.
        """
        found, batch = [], view.batch_size
        if view.allows_uniform and self.cost.uniform_measured(batch):
            found.append(self._best_uniform(survival, view))
        if view.allows_draft_free and self.cost.draft_free_measured(batch):
            found.append(self._draft_free(view))
        return found

    def _best_uniform(self, survival: Array, view: BatchView) -> Plan:
        """Return the uniform plan with the highest rate."""
        batch, plans = view.batch_size, []
        for layers in view.depths:
            each = self.full_rows(layers)
            tokens = batch * (1.0 + _most_likely(survival[:, :layers], each - 1))
            forwarded = _forwarded(view, batch * each)
            took = self.cost.one(forwarded, batch, layers, context=view.context, uniform=True)
            plans.append(Plan(layers, batch * each, tokens, weighed(took, self.tpot_ms)))
        return best_of(plans)

    def _draft_free(self, view: BatchView) -> Plan:
        """Return the plan of a draft-free step, with its mean cost over a burst."""
        batch, extends = view.batch_size, self.cost.extends_per_step(self._burst)
        forwarded = _forwarded(view, batch)
        took = self.cost.draft_free(forwarded, batch, context=view.context, extends=extends)
        return Plan(0, batch, float(batch), weighed(took, self.tpot_ms))

    def _tried(self, choice: _Choice, view: BatchView, best: Plan) -> Plan | None:
        """Return a uniform plan to try now, which may be draft-free: one that was seldom measured
        for about as many requests, and may replace the ``best`` plan.
        """
        batch, rate = view.batch_size, best.rate
        layers = choice.uniform.plan.layers if choice.uniform else -1  # these steps need no try
        hoped = self._hoped_draft_free(view, rate) if view.allows_draft_free and layers else None
        if hoped and self._explore.uniform(hoped, batch, rate, self._burst):
            return self._draft_free(view)
        unknown = not self.cost.uniform_measured(batch)
        seldom = unknown or self._comparison.few(batch, draft_free=False)
        if view.allows_uniform and layers < 1 and seldom:
            uniform = self._best_uniform(choice.survival, view)
            promises = unknown or uniform.rate > rate * (1.0 - NEARLY)
            if promises and self._explore.uniform(uniform, batch, rate, TRIAL):
                return uniform
        return None

    def _hoped_draft_free(self, view: BatchView, rate: float) -> Plan | None:
        """Return a draft-free plan if it was seldom measured and may exceed the ``rate``.

        Before it is measured, it has the rest of a uniform step. ``None`` if the target's forward
        alone would be slower than ``rate``, even if its cost were too high because it has expired
        or is known only from before serving.
        """
        batch, rows = view.batch_size, _forwarded(view, view.batch_size)
        free = self._draft_free(view)
        if self.cost.draft_free_measured(batch):
            seldom = self._comparison.few(batch, draft_free=True)
            return free if seldom and free.rate > rate * (1.0 - NEARLY) else None
        distorted = bool(self.cost.verify.stale([rows]))
        if free.rate <= rate * (1.0 - DISTORTED * distorted):
            return None
        took = self.cost.one(rows, batch, 1, uniform=True)
        return free._replace(milliseconds=weighed(took, self.tpot_ms))

    @property
    def _burst(self) -> int:
        """Draft-free steps that share one draft extend."""
        return self.max_depth + 1

    @property
    def _unmeasured(self) -> bool:
        """Whether there are too few measurements to plan with."""
        needed = [self.cost.verify, *([self.cost.layer] if self.max_depth > 1 else ())]
        return any(not curve.seeded and curve.measurements < ENOUGH for curve in needed)

    # -- learning --------------------------------------------------------------------------

    def _learn_gains(self, record: StepRecord, num_correct: Numbers, forecast: Array) -> None:
        """Learn from the drafts accepted of each request [B], and those ``forecast`` [d]."""
        constrained = record.constrained is not None
        accepted = (num_correct[:, None] > np.arange(len(forecast))).sum(axis=0)
        factors = self._gains.of_layers(constrained=constrained)[: len(forecast)]
        expected = float((forecast * factors).sum())
        if accepted.sum() - expected > SURPRISE * (expected + 1.0) ** 0.5:
            self._verdicts.doubt(record.batch_size)
        if record.plan.kind is not StepKind.EXPLORE:  # whose forecast knew little
            each = accepted / record.batch_size, forecast / record.batch_size
            self._gains.learn(self._steps, *each, constrained=constrained)

    def _learn_times(self, record: StepRecord, times: StepTimes) -> None:
        plan, batch = record.plan, record.batch_size
        uniform, dummy = plan.kind is StepKind.UNIFORM, plan.kind is StepKind.WARMUP
        took, over = times.step_ms, None
        if took is not None and (predicted := self._predicted_ms(record, times)) is not None:
            over = took / predicted
            self._errors.append(predicted / took)
            self.predicted_ms += predicted
            self.measured_ms += took
        if not dummy and self._paused(record, times, over):
            return
        if took is not None:
            self._explore.took(took)
        if over is not None:
            draft_free = plan.num_layers == 0
            self._comparison.took(batch, over, uniform=uniform, draft_free=draft_free)
        step: Any = {"batch": batch, "layers": plan.num_layers, "context": record.context}
        self.cost.observe(times, uniform=uniform, dummy=dummy, **step)

    def _paused(self, record: StepRecord, times: StepTimes, over: float | None) -> bool:
        """Whether the machine paused during a step, which took ``over`` times as long as predicted.
        If this is unknown, its target forward counts.
        """
        if over is None:
            predicted = self.cost.target(times.rows, record.batch_size, record.context)
            over = times.verify_ms / predicted if predicted > 0.0 else 1.0
        known = self.cost.verify.measured(times.rows)
        self._pauses = self._pauses + 1 if known and over > PAUSE else 0
        return 0 < self._pauses < PAUSES_IN_A_ROW

    def _predicted_ms(self, record: StepRecord, times: StepTimes) -> float | None:
        """Return the predicted time of a step; ``None`` if too little was measured."""
        layers, batch, context = record.plan.num_layers, record.batch_size, record.context
        if layers == 0:
            if not self.cost.draft_free_measured(batch):
                return None
            return self.cost.draft_free(times.rows, batch, context=context, extends=times.extends)
        if not self.cost.rest.known:
            return None
        uniform = record.plan.kind is StepKind.UNIFORM
        sizes = times.rows, batch, layers
        return self.cost.one(*sizes, context=context, uniform=uniform, as_measured=True)

    def _learn_outcomes(self, of: Acceptance, layers: int, *outcome: Numbers) -> None:
        """Learn from the outcomes of steps of d ``layers``; see :class:`StepRecord`."""
        confidences, num_drafts, num_correct = outcome
        of.drafted(confidences)
        depths = np.broadcast_to(1 + np.arange(layers), confidences.shape)
        verified = depths <= num_drafts[:, None]
        survived = (depths <= num_correct[:, None])[verified]
        least = np.minimum.accumulate(confidences, axis=1)[verified]
        predicted = of.survivals(confidences)[verified]
        of.grade(depths[verified], least, predicted, survived)
        of.survival.learn(confidences, num_drafts, num_correct)

    def _first_layers(self, outcome: tuple[Numbers, ...]) -> Array:
        """Return [B] or [B, C]: confidences of the first layers of an ``outcome``."""
        return np.asarray(outcome[0][:, 0])

    def _acceptance(self, survival: Survival | OneSlope) -> Acceptance:
        """Return an empty :class:`Acceptance` for a class of requests."""
        return Acceptance(survival, self.max_depth, survival.of_chains)

    # -- reports and saved state -----------------------------------------------------------

    def best_plan_by_batch_size(
        self, row_counts: Mapping[int, Sequence[int]]
    ) -> list[dict[str, Any]]:
        """Return the best plan of each depth for each number of requests B in ``row_counts``.
        Drafts are like the last ones. :class:`~sglang_c2t.plan.cost.Curve` extrapolates costs
        beyond the measured sizes.
        """
        self.catch_up()
        if self._unmeasured or not self.free.firsts:
            return []
        survival = self.free.expected(self.samples)
        depths = [self.max_depth] if self._all_layers else range(1, self.max_depth + 1)
        requests, context = self._last
        found = []
        for batch, rows in row_counts.items():
            cost = partial(self.cost, context=round(context / requests * batch))
            plans = every_plan(survival, batch, cost, depths=depths, tiers=rows)
            names = "layers", "rows", "tokens", "milliseconds"
            each = (dict(zip(names, plan, strict=False)) for plan in plans.best_of_each_depth())
            found += [{"requests": batch, **plan} for plan in each]
        return found

    @property
    def predicted_over_measured(self) -> float | None:
        """Median ratio of predicted to measured step time; ``None`` without steps."""
        return float(np.median(self._errors)) if self._errors else None

    def calibration_errors(self) -> list[float]:
        """Return the expected calibration error of predicted survivals by depth. Each prediction
        precedes the learning from its outcome.
        """
        self.catch_up()
        return self.free.predictions.errors()

    def report(self) -> dict[str, Any]:
        """Return curves, reliability and prediction error for reports."""
        self.catch_up()
        quartiles = np.quantile(self._errors, (0.25, 0.75)).tolist() if self._errors else []
        return {
            "steps": self._steps,
            "cost_ms": self.cost.state(),
            "predicted_over_measured": self.predicted_over_measured,
            "predicted_over_measured_quartiles": quartiles,
            "confidence": self.free.grades.to_dict(),
            "constrained": self.constrained.grades.to_dict(),
            "calibration_error": self.calibration_errors(),
            "reliability": self.free.predictions.to_dict(),
        }

    def state(self) -> dict[str, Any]:
        """Return the state that a restarted server continues from, for JSON."""
        self.catch_up()
        return {
            "survival": self.survival.state(),
            "cost": self.cost.state(),
            "cold_start_budget": self._explore.budget,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`; ValueError if it does not fit."""
        self.survival.restore(state["survival"])
        self.free.refresh()
        self.cost.restore(state["cost"])
        # Restore the exploration budget so that a restart does not explore again.
        budget = float(state.get("cold_start_budget", 0.0))
        if not 0.0 <= budget <= COLD_START_BUDGET:
            raise ValueError(f"{budget} is no number of steps from 0 to {COLD_START_BUDGET:g}")
        self._explore.budget = budget

    def forget(self) -> None:
        """Reset, costs included."""
        self.reset()
        self._forget_costs()

    def reset(self) -> None:
        """Forget everything but the costs, which depend on the machine."""
        self._outcomes.clear()
        self._seen = self._new = 0
        self.free.reset()
        self.constrained.reset()
        self._forget_verdicts()

    def _forget_costs(self) -> None:
        self.cost = StepCost()
        self._explore = Exploration(self.max_depth)

    def _forget_verdicts(self) -> None:
        self._verdicts, self._comparison = Verdicts(), Comparison()
        self._gains = Gains(self.max_depth)


def _resized(plan: StepPlan, rows: int) -> StepPlan:
    """Return a uniform ``plan`` for another number of requests, which forward ``rows``."""
    drafts = plan.expected_drafts
    if drafts is not None:
        drafts = tuple(each * rows / plan.row_budget for each in drafts)
    return replace(plan, row_budget=rows, expected_drafts=drafts)


def _forwarded(view: BatchView, rows: int) -> int:
    """Return the rows that a forward of so many ``rows`` takes, with padding."""
    at = bisect.bisect_left(view.row_counts, rows)
    return view.row_counts[min(at, len(view.row_counts) - 1)]


def _most_likely(survival: Array, drafts: int) -> float:
    """Return the mean tokens gained by the ``drafts`` most likely drafts of samples [S, d, ...]."""
    each = survival.reshape(len(survival), -1)
    if drafts < each.shape[1]:
        each = -np.sort(-each, axis=1)[:, :drafts]
    return float(each.sum() / len(survival))

"""A server reports steps to its planner and follows its plans; on the host's own clock."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.kernels.rows import chain_links
from sglang_c2t.plan.cost import size_bucket
from sglang_c2t.plan.fixed import FixedPlanner
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord
from sglang_c2t.plan.survival import OneSlope, Survival
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.draft.planning import REFRESH_EVERY, Planning, Step, geometric_sizes
from sglang_c2t.srt.draft.selection import ChainSelector
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.timing import Mark
from tests.doubles import double
from tests.srt.chains import full_chains

LAYERS, SLOTS = 4, 8

PLANNED, UNIFORM = StepKind.PLANNED, StepKind.UNIFORM


class Scripted(Planner):
    """Returns the test's plans, and records its arguments."""

    def __init__(
        self, layers: int = LAYERS, rows: int = 6, full: int | None = None, kind: StepKind = PLANNED
    ) -> None:
        super().__init__(LAYERS, Survival(LAYERS))
        self.next: Any = StepPlan(kind, layers, 1, rows, full)
        self.views: list[BatchView] = []
        self.records: list[StepRecord] = []

    def plan(self, batch: BatchView) -> StepPlan:
        self.views.append(batch)
        return self.next

    def learn(self, record: StepRecord) -> None:
        self.records.append(record)
        if record.plan.kind is StepKind.WARMUP:
            super().learn(record)

    @property
    def outcomes(self) -> list[StepRecord]:
        return [record for record in self.records if record.outcome]

    @property
    def times(self) -> list[Any]:
        return [record.times for record in self.records if record.times]


def planning_of(planner: Planner, tiers: Tiers | None = None, **more: Any) -> Planning:
    selector = ChainSelector(planner, width=LAYERS + 1, slots=SLOTS, device="cpu")
    return Planning(planner, selector, tiers=lambda: tiers, width=LAYERS + 1, device="cpu", **more)


def score(planning: Planning, confidences: Any) -> None:
    """The gate scores the layers of a draft."""
    drafted = torch.tensor(np.asarray(confidences), dtype=torch.float32)
    planning.selector.scored(drafted.unbind(dim=1))


def verify(step: Step, rows: int, milliseconds: float = 0.0) -> None:
    """SGLang's target worker forwards so many rows, in exactly so much time by its marks."""
    target = double("TpModelWorker", model_runner=double("ModelRunner"))
    target.model_runner.decode_cuda_graph_runner = None
    target.forward_batch_generation = lambda: time.sleep(milliseconds / 1e3)
    packing = Packing.full(1, 1, "cpu")
    packing.forwarded_rows = rows
    verified = ChainVerifyInput.cut(
        full_chains(1, 1), torch.ones(1, dtype=torch.int32), packing=packing
    )
    clock = itertools.count(0.0, milliseconds / 1e3)
    with mock.patch.object(time, "perf_counter", side_effect=clock), step.timing(target, verified):
        target.forward_batch_generation()


def finish(planning: Planning, step: Step, rows: list[int], accepted: list[int]) -> None:
    """So many rows of each request were verified, and tokens accepted, bonus included."""
    lens = torch.tensor(rows)
    verified = ChainVerifyInput.cut(full_chains(len(rows), LAYERS + 1), lens, step=step)
    if step.verify is None:
        verify(step, sum(rows))
    planning.finish(step, verified, torch.tensor(accepted))


@given(st.integers(0, 2**32 - 1), st.integers(1, SLOTS), st.integers(1, LAYERS), st.booleans())
def test_planning_gives_rows_to_the_best_drafts(
    seed: int, batch: int, layers: int, explores: bool
) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(batch, batch * (LAYERS + 1) + 1))
    chosen = int(rng.integers(batch)) if explores else None
    planner = Scripted(layers, rows, chosen)
    planning = planning_of(planner)
    full = rng.uniform(size=batch) < 0.3
    # Whoever opts out has all layers drafted, as a planner knows.
    step = replace(planning.begin(batch), full=np.flatnonzero(full).tolist())
    confidences = rng.uniform(size=(batch, layers))
    score(planning, confidences)
    lens, links, total = planning.selector.select(step)
    if chosen is not None:
        full[chosen] = True
    assert lens.sum() == total
    assert links.equal(chain_links(lens, LAYERS + 1)[1])
    assert (lens[torch.tensor(full)] == layers + 1).all()
    others = int((~full).sum())
    budget = rows - batch - layers * int(full.sum())
    kept = (lens[torch.tensor(~full)] - 1).numpy()
    assert kept.sum() == min(max(budget, 0), others * layers)
    survival = planner.survival.of_chains(confidences.astype(np.float32))[~full]
    taken = np.arange(layers) < kept[:, None]
    if taken.any() and not taken.all():
        assert survival[taken].min() >= survival[~taken].max() - 1e-6


def test_planning_opt_out_drafts_all_layers_and_no_uniform_step() -> None:
    planner = Scripted()
    planning_of(planner).begin(2, full=[1])
    (view,) = planner.views
    assert [*view.depths] == [LAYERS]
    assert not view.allows_uniform


def test_planning_ranks_select_by_the_survivals_of_rank_0() -> None:
    planning = planning_of(Scripted(layers=2, rows=4))
    step = planning.begin(2)
    score(planning, [[0.9, 0.8], [0.1, 0.1]])
    assert planning.selector.select(step)[0].tolist() == [3, 1]
    select = planning.selector.select(step, agreed=lambda mine: mine.flip(0))
    assert select[0].tolist() == [1, 3]


@pytest.mark.parametrize(
    "kind", [PLANNED, UNIFORM, StepKind.EXPLORE, StepKind.UNMEASURED], ids=lambda kind: kind.value
)
def test_planning_ranks_take_the_plan_of_rank_0(kind: StepKind) -> None:
    said: list[list[int]] = []
    first, other = Scripted(3, 8, 1, kind), Scripted(1, 2)
    plannings = [
        planning_of(first, agree=lambda numbers: said.append(numbers) or numbers),
        planning_of(other, agree=lambda _: said.pop(0)),
    ]
    plans = [planning.begin(2).plan for planning in plannings]
    assert plans[0] == plans[1] == StepPlan(kind, 3, 1, 8, 1)


@pytest.mark.parametrize(("kind", "rows"), [(PLANNED, 6), (UNIFORM, 4)])
def test_planning_ranks_agree_on_layers(kind: StepKind, rows: int) -> None:
    planner = Scripted(3, 8, None, kind)
    planner.next = replace(planner.next, row_budget=8 if kind is UNIFORM else 6)
    step = planning_of(planner).begin(2, agreed_layers=lambda mine: mine - 2)
    assert (step.plan.num_layers, step.plan.row_budget) == (1, min(rows, 4))


def test_planning_uniform_step_teaches_its_time_only() -> None:
    """Its drafts were not scored."""
    planner = Scripted(layers=2, rows=6, kind=UNIFORM)
    planning = planning_of(planner)
    for _ in range(3):
        step = planning.begin(2)
        finish(planning, step, [3, 3], [1, 2])
    assert planner.outcomes == []
    assert [record.plan.kind for record in planner.records] == [UNIFORM, UNIFORM]
    assert len(planner.times) == 2


def test_planning_times_a_step_to_the_start_of_the_next() -> None:
    planner = Scripted()
    planning = planning_of(planner)
    for _ in range(2):
        step = planning.begin(2)
        step.layers_begin()
        time.sleep(0.003)
        step.layers_begin()  # of several layers the first counts
        time.sleep(0.003)
        step.layers_end()
        verify(step, rows=6, milliseconds=10.0)
        finish(planning, step, [3, 3], [1, 1])
        time.sleep(0.002)
    (times,) = planner.times
    assert times.rows == 6
    assert times.draft_ms >= 6.0
    assert times.verify_ms >= 10.0
    assert times.step_ms >= times.draft_ms + times.verify_ms + 2.0


def test_planning_step_before_a_prefill_or_an_idle_server_is_timed_in_part() -> None:
    """Its forwards are. Requests that came to an idle server were prefilled by another one."""
    planner, forwards = Scripted(), [7]
    planning = planning_of(planner, forwards=lambda: forwards[0])
    for prefills, unmeasured in ((0, []), (1, []), (0, []), (0, [0]), (0, [0, 1]), (0, [])):
        forwards[0] += prefills
        finish(planning, planning.begin(2, unmeasured=unmeasured, context=9), [2, 2], [1, 1])
    times = [record.times for record in planner.records]
    assert [each.step_ms is None for each in times] == [True, False, False, True, False]
    assert all(each.verify_ms >= 0.0 for each in times)
    assert {record.context for record in planner.records} == {9}
    assert len(planner.outcomes) == 4, "outcomes are learnt all the same, but of unmeasured drafts"


def test_step_has_arrived_once_the_device_has_passed_all_its_marks() -> None:
    """The draft extends of draft-free steps come last, if other work follows."""
    passed, late = Mark(False), Mark(False)
    step = Step(StepPlan(StepKind.UNIFORM, 0, 1, 2), 2, 0, passed)
    step.draft, step.verify = [passed, late], (passed, passed)
    assert step.arrived
    with mock.patch.object(Mark, "passed", property(lambda mark: mark is not late)):
        assert not step.arrived
        step.draft = []
        assert step.arrived


def test_planning_learns_outcomes_when_the_next_step_begins() -> None:
    planner = Scripted(layers=3)
    planning = planning_of(planner)
    step = planning.begin(2)
    confidences = np.array([[0.5, 0.25, 0.125], [0.75, 0.5, 0.25]])
    score(planning, confidences)
    finish(planning, step, [4, 2], [2, 2])
    assert planner.records == []
    planning.begin(1)
    ((learnt, drafts, correct),) = [record.outcome for record in planner.records]
    assert learnt.tolist() == confidences.tolist()
    assert drafts.tolist() == [3, 1]
    assert correct.tolist() == [1, 1]


def test_planning_row_counts_are_the_tiers_that_hold_the_batch() -> None:
    planner = Scripted()
    planning_of(planner, Tiers(4, LAYERS + 1)).begin(3)
    planning_of(planner, Tiers(2, LAYERS + 1)).begin(11)
    small, large = (list(view.row_counts) for view in planner.views)
    assert small == [4, 8, 16, 20]
    assert large == geometric_sizes(11, 55), "none does: it runs without a graph"


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 6), (64, 384), (7, 1000)])
def test_geometric_sizes_span_a_range(least: int, most: int) -> None:
    found = geometric_sizes(least, most)
    assert found[0] == least
    assert found[-1] == most
    assert found == sorted(set(found))
    assert len(found) <= 62
    between = found[1:-1]
    assert [size_bucket(n) for n in between] == between, "else one cost would stand for several"
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(gap <= max(1, a / 8) for gap, a in zip(gaps, found, strict=False)), "none too far"


def test_planning_warm_up_step_teaches_costs_only() -> None:
    planner = Scripted()
    planning = planning_of(planner)
    for learn in (False, True):
        step = planning.warm_up_step(2, layers=3, rows=7, context=10)
        step.layers_begin()
        time.sleep(0.004)
        step.layers_end()
        score(planning, np.full((2, 3), 0.5))
        *_, total = planning.selector.select(step)
        assert total == 7
        verify(step, rows=total, milliseconds=10.0)
        finish(planning, step, [4, 3], [2, 2])
        if learn:
            planning.learn_warm_up(step)
        assert planner.cost.verify.known == learn
    assert planner.cost.verify(7) >= 10.0
    assert planner.cost.layer(2) >= 2.0
    assert not planner.cost.rest.known
    planning.begin(2)
    assert [record.plan.kind for record in planner.records] == [StepKind.WARMUP]


def test_planning_unmeasured_requests_teach_nothing() -> None:
    planner = Scripted(layers=2)
    planning = planning_of(planner)
    for unmeasured in ([1], []):
        step = planning.begin(2, unmeasured=unmeasured)
        score(planning, [[0.5, 0.25], [1.0, 0.75]])
        finish(planning, step, [3, 2], [2, 2])
    planning.begin(2)
    found = [(drafts.tolist(), correct.tolist()) for _, drafts, correct in
             (record.outcome for record in planner.records)]  # fmt: skip
    assert found == [([2], [1]), ([2, 1], [1, 1])]


def test_planning_of_a_gate_plans_full_drafts() -> None:
    planner = FixedPlanner(LAYERS, 1, LAYERS + 1)
    planning = Planning(
        planner, None, tiers=lambda: None, width=LAYERS + 1, device="cpu",
        agree=lambda _: 1 // 0,  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    assert not planning.plans
    assert planning.begin(2, pending=True).ends_burst, "of the planner that served before"
    for rows in [3, 5, 7, 9] * 5:
        step = planning.begin(2)
        assert step.plan == StepPlan(StepKind.FIXED, LAYERS, 1, 2 * (LAYERS + 1))
        verify(step, rows, milliseconds=rows)
        finish(planning, step, [1, 1], [1, 1])
    assert planner.row_ms is not None
    row_ms, error = planner.row_ms
    assert row_ms == pytest.approx(1.0, abs=0.5)
    assert error < 0.5


# -- a planner that fails -----------------------------------------------------------------


def fallible(planner: Planner, failures: list[Exception], **more: Any) -> Planning:
    return planning_of(planner, failed=failures.append, **more)


def serve(planning: Planning, *, rows: tuple[int, ...] = (3, 2)) -> tuple[int, StepKind]:
    """A step of two requests; returns the rows of all, and its kind."""
    step = planning.begin(2)
    score(planning, np.full((2, step.plan.num_layers), 0.5))
    lens, _, total = planning.selector.select(step)
    assert int(lens.sum()) == total
    verify(step, rows=total)
    finish(planning, step, [*rows], [2, 2])
    return total, step.plan.kind


FULL = 2 * (1 + LAYERS), StepKind.FALLBACK


@pytest.mark.parametrize("method", ["plan", "learn"])
def test_planning_fallback_when_the_planner_raises_verifies_full_drafts(method: str) -> None:
    planner, failures = Scripted(layers=2, rows=3), list[Exception]()
    planning = fallible(planner, failures)
    assert [serve(planning), serve(planning)] == [(3, PLANNED)] * 2

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no")

    right = getattr(planner, method)
    setattr(planner, method, fail)
    for number in range(1, 4):
        assert serve(planning) == FULL
        assert len(failures) == number
    setattr(planner, method, right)
    for _ in range(2):
        planned = serve(planning)
    assert planned == (3, PLANNED)
    assert isinstance(failures[0], ZeroDivisionError)


RIGHT = StepPlan(PLANNED, 2, 1, 3)


@pytest.mark.parametrize(
    "plan",
    [
        None,
        replace(RIGHT, num_layers=0),
        replace(RIGHT, num_layers=LAYERS + 1),
        replace(RIGHT, row_budget=np.nan),  # type: ignore[arg-type]
        replace(RIGHT, row_budget=np.inf),  # type: ignore[arg-type]
        replace(RIGHT, row_budget=None),  # type: ignore[arg-type]
        replace(RIGHT, full_draft_of=2),
        replace(RIGHT, full_draft_of=-1),
        replace(RIGHT, kind="because"),  # type: ignore[arg-type]
        replace(RIGHT, kind=StepKind.WARMUP),
        replace(RIGHT, kind=UNIFORM, row_budget=1),
        replace(RIGHT, kind=UNIFORM, row_budget=2 * LAYERS + 3),
    ],
    ids=str,
)
def test_planning_fallback_when_the_plan_is_invalid_verifies_full_drafts(plan: Any) -> None:
    failures = list[Exception]()
    planner = Scripted()
    planner.next = plan
    assert serve(fallible(planner, failures)) == FULL
    assert len(failures) == 1


@pytest.mark.parametrize("raising", [0, 1])
def test_planning_fallback_of_rank_0_is_that_of_all_ranks(raising: int) -> None:
    """And as planned where another one's does."""
    said: list[list[int]] = []
    planners = [Scripted(layers=2, rows=3) for _ in range(2)]
    plannings = [
        fallible(planners[0], [], agree=lambda numbers: said.append(numbers) or numbers),
        fallible(planners[1], [], agree=lambda _: said.pop(0)),
    ]
    planners[raising].next = None
    found = [serve(planning) for planning in plannings]
    assert found == [FULL if raising == 0 else (3, PLANNED)] * 2


def test_planning_report_that_raises_is_none() -> None:
    planner, failures = Scripted(), list[Exception]()
    planning = fallible(planner, failures)
    assert planning.report(4) is not None
    planner.report = lambda: 1 // 0  # type: ignore[method-assign,return-value,assignment]
    assert planning.report(4) is None
    assert len(failures) == 1


STRANGE = [np.nan, np.inf, -np.inf, -1.0, 2.0]


@pytest.mark.parametrize("kind", [Survival, OneSlope])
@pytest.mark.parametrize("strange", [*STRANGE, 1.0 + 1e-6])
def test_planning_confidences_that_are_no_probabilities_teach_nothing(
    kind: type, strange: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Any planner may get another policy's confidences, or ones of logits that are not finite."""
    planner = Planner(LAYERS, kind(LAYERS))
    planning = planning_of(planner)
    for _ in range(2 * OneSlope.EVERY):
        step = planning.begin(2)
        if step.plan.kind is UNIFORM:
            finish(planning, step, [1 + step.plan.num_layers] * 2, [1, 1])
            continue
        confidences = np.full((2, step.plan.num_layers), 0.5)
        confidences[0, -1] = strange
        score(planning, confidences)
        lens, _, total = planning.selector.select(step)
        assert int(lens.sum()) == total
        verify(step, rows=total)
        finish(planning, step, lens.tolist(), [1, 1])
    report = planning.report(2)
    assert report is not None
    assert np.isfinite(planner.survival.of_chains(np.full((1, LAYERS), 0.5))).all()
    odd = strange in STRANGE or np.isnan(strange)
    assert (planning.strange > 0) == (report["strange_confidences"] > 0) == odd
    lines = [r for r in caplog.records if "no probabilities" in r.getMessage()]
    assert len(lines) == int(odd), "one line, however many there are"


# -- constrained requests -------------------------------------------------------------------


def test_planning_constrained_requests_teach_their_class_only() -> None:
    planner = Scripted(layers=2)
    planning = planning_of(planner)
    for constrained in ([1], [], [0, 1]):
        step = planning.begin(2, constrained=constrained)
        score(planning, [[0.5, 0.25], [0.75, 0.5]])
        finish(planning, step, [3, 2], [2, 1])
    planning.begin(2)
    found = [
        [[*of[1]] for of in (record.of_class(constrained=kind) for kind in (False, True)) if of]
        for record in planner.records
    ]
    assert found == [[[2], [1]], [[2, 1]], [[2, 1]]]
    assert [view.num_constrained for view in planner.views] == [1, 0, 2, 0]
    assert [view.allows_uniform for view in planner.views] == [False, True, False, True]


def test_planning_selects_drafts_by_the_survival_of_their_class() -> None:
    """One of two requests with equal confidences has its drafts rejected: it gets no row, and
    takes none of the other's.
    """
    planner = Scripted(layers=2, rows=4)
    planning = planning_of(planner)
    for _ in range(REFRESH_EVERY):
        step = planning.begin(2, constrained=[0])
        score(planning, np.full((2, 2), 0.5))
        finish(planning, step, [3, 3], [1, 3])
        mask = np.array([True, False]).repeat(50)
        outcome = np.full((100, 2), 0.5), np.full(100, 2.0), np.where(mask, 0.0, 2.0)
        record = StepRecord(step.plan, 100, outcome=outcome, constrained=mask)
        Planner.learn(planner, record)
        planner.catch_up()

    def selected(*constrained: int) -> list[int]:
        step = planning.begin(2, constrained=constrained)
        score(planning, np.full((2, 2), 0.5))
        lens: list[int] = planning.selector.select(step)[0].tolist()
        return lens

    assert selected(0) == [1, 3]
    assert selected(1) == [3, 1]
    assert selected() == [2, 2]

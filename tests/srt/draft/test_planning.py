"""What a server tells its planner, and what it makes of the answers; on the host's own clock."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.draft.slots import FirstLayer
from sglang_c2t.kernels.rows import chain_links
from sglang_c2t.plan.cost import about
from sglang_c2t.plan.plan import Plan
from sglang_c2t.plan.planner import Choice, Planner
from sglang_c2t.plan.survival import OneSlope, Survival
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.draft.planning import REFRESH_EVERY, Planning, every_few
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.packing import Packing
from tests.doubles import double
from tests.srt.chains import full_chains

LAYERS, SLOTS = 4, 8


class Scripted(Planner):
    """Chooses what the test says, and remembers what it is told."""

    def __init__(self, layers: int = LAYERS, rows: int = 6, whole: int | None = None) -> None:
        super().__init__(LAYERS, Survival(LAYERS))
        self.plan, self.reason, self.whole = Plan(layers, rows, 1.0, 1.0), "plan", whole
        self.first: list[float] = []
        self.rows_to_choose: list[int] = []
        self.drafts: list[tuple[Any, ...]] = []
        self.of_constrained: list[bool] = []
        self.times: list[dict[str, float]] = []

    def choose(
        self, first: Any, batch: int, tiers: Any, depths: Any = None, *, context: int = 0, **_: Any
    ) -> Choice:
        self.first, self.rows_to_choose, self.context = first.tolist(), list(tiers), context
        return Choice(self.plan, self.reason, self.whole)

    def plain_step(self, batch: int) -> None:
        return None

    def settle(self, *_args: Any) -> Plan:
        return self.plan

    def learn_drafts(self, *told: Any, constrained: bool = False) -> None:
        self.drafts.append(told)
        self.of_constrained.append(constrained)

    def learn_time(self, choice: Plan, **told: Any) -> None:
        self.times.append(told)


def planning_of(planner: Planner, tiers: Tiers | None = None) -> Planning:
    return Planning(planner, tiers=lambda: tiers, width=LAYERS + 1, slots=SLOTS, device="cpu")


def first(*confidences: float) -> Any:
    known = torch.tensor([confidences])
    return lambda: FirstLayer(known[0], known, known)


def draft(planning: Planning, confidences: np.ndarray) -> None:
    planning.drafted(torch.tensor(confidences, dtype=torch.float32).unbind(dim=1))


def verify(planning: Planning, rows: int, milliseconds: float = 0.0) -> None:
    """SGLang's target worker forwards so many rows."""
    target = double("TpModelWorker", model_runner=double("ModelRunner"))
    target.model_runner.decode_cuda_graph_runner = None
    target.forward_batch_generation = lambda: time.sleep(milliseconds / 1e3)
    packing = Packing.full(1, 1, "cpu")
    packing.forwarded_rows = rows
    lens = torch.ones(1, dtype=torch.int32)
    verify_input = ChainVerifyInput.cut(full_chains(1, 1), lens, packing=packing)
    with planning.timing(target, verify_input):
        target.forward_batch_generation()


def verified_rows(*rows: int) -> ChainVerifyInput:
    return ChainVerifyInput.cut(full_chains(len(rows), LAYERS + 1), torch.tensor(rows))


@given(st.integers(0, 2**32 - 1), st.integers(1, SLOTS), st.integers(1, LAYERS), st.booleans())
def test_the_best_drafts_get_the_rows_and_who_wants_all_gets_all(
    seed: int, batch: int, layers: int, explores: bool
) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(batch, batch * (LAYERS + 1) + 1))
    planner = Scripted(layers, rows, whole=int(rng.integers(batch)) if explores else None)
    planning = planning_of(planner)
    planning.begin(batch, first(*rng.uniform(size=batch)))
    confidences = rng.uniform(size=(batch, layers))
    draft(planning, confidences)
    wants_all = rng.uniform(size=batch) < 0.3
    lens, links, total = planning.settle(layers, np.flatnonzero(wants_all).tolist())
    if explores:
        wants_all[planner.whole] = True
    assert lens.sum() == total
    assert links.equal(chain_links(lens, LAYERS + 1)[1])
    assert (lens[torch.tensor(wants_all)] == layers + 1).all()
    others = int((~wants_all).sum())
    budget = rows - batch - layers * int(wants_all.sum())
    kept = (lens[torch.tensor(~wants_all)] - 1).numpy()
    assert kept.sum() == min(max(budget, 0), others * layers)
    survival = planner.survival.of_chains(confidences.astype(np.float32))[~wants_all]
    taken = np.arange(layers) < kept[:, None]
    if taken.any() and not taken.all():
        assert survival[taken].min() >= survival[~taken].max() - 1e-6


def test_ranks_that_see_other_survivals_cut_by_the_first_ones() -> None:
    planning = planning_of(Scripted(layers=2, rows=4))
    planning.begin(2, first(0.5, 0.5))
    draft(planning, np.array([[0.9, 0.8], [0.1, 0.1]]))
    assert planning.settle(2)[0].tolist() == [3, 1]
    assert planning.settle(2, agreed=lambda mine: mine.flip(0))[0].tolist() == [1, 3]


@pytest.mark.parametrize("reason", ["plan", "explore", "unknown", "plain"])
def test_ranks_follow_the_first_in_all_that_decides_what_is_forwarded(reason: str) -> None:
    said: list[list[int]] = []
    first_rank, other = Scripted(layers=3, rows=7, whole=1), Scripted(layers=1, rows=2)
    first_rank.reason = reason
    plannings = [planning_of(first_rank), planning_of(other)]
    plannings[0].agree = lambda numbers: said.append(numbers) or numbers  # type: ignore[func-returns-value]
    plannings[1].agree = lambda _: said.pop(0)
    choices = [planning.begin(2, first(0.5, 0.5)) for planning in plannings]
    assert choices[0] == choices[1]._replace(plan=choices[0].plan)
    assert choices[0].plan[:2] == choices[1].plan[:2] == (3, 7)
    assert plannings[0].plain == plannings[1].plain == (reason == "plain")


def test_of_a_plain_step_only_its_time_is_learnt() -> None:
    """Nobody said how sure its drafts were; its rows are shared alike."""
    planner = Scripted(layers=2, rows=6)
    planner.reason = "plain"
    planning = planning_of(planner)
    for _ in range(3):
        planning.begin(2, first(0.5, 0.5))
        lens, total = planning.alike()
        assert (lens.tolist(), total) == ([3, 3], 6)
        verify(planning, 6)
        planning.verified(verified_rows(3, 3), torch.tensor([1, 2]))
    assert planner.drafts == []
    assert [told["plain"] for told in planner.times] == [True, True]


def test_a_step_is_timed_from_its_start_to_the_next_one() -> None:
    planner = Scripted()
    planning = planning_of(planner)
    for _ in range(2):
        planning.begin(2, first(0.5, 0.5))
        planning.layers_begin()
        time.sleep(0.003)
        planning.layers_begin()  # of several layers the first counts
        time.sleep(0.003)
        planning.layers_end()
        verify(planning, rows=6, milliseconds=10.0)
        time.sleep(0.002)
    (told,) = planner.times
    assert told["rows"] == 6
    assert told["batch"] == 2
    assert told["draft_ms"] >= 6.0
    assert told["verify_ms"] >= 10.0
    assert told["step_ms"] >= told["draft_ms"] + told["verify_ms"] + 2.0


def test_a_step_that_something_came_behind_is_not_timed() -> None:
    planner = Scripted()
    planning = planning_of(planner)
    planning.begin(1, first(0.5))
    verify(planning, rows=2)
    planning.interrupted()
    planning.begin(1, first(0.5))
    planning.begin(1, first(0.5))
    assert planner.times == [], "one was interrupted, and one verified nothing"


def test_prices_are_of_the_contexts_that_the_step_has() -> None:
    planner = Scripted()
    planning = planning_of(planner)
    planning.begin(2, first(0.5, 0.5), context=700)
    verify(planning, rows=2)
    planning.begin(2, first(0.5, 0.5), context=702)
    assert planner.context == 702
    assert [told["context"] for told in planner.times] == [700]


def test_outcomes_are_learnt_at_the_next_step() -> None:
    planner = Scripted(layers=3)
    planning = planning_of(planner)
    planning.begin(2, first(0.25, 0.75))
    assert planner.first == [0.25, 0.75]
    confidences = np.array([[0.5, 0.25, 0.125], [0.75, 0.5, 0.25]])
    draft(planning, confidences)
    planning.verified(verified_rows(4, 2), torch.tensor([2, 2]))
    assert planner.drafts == []
    planning.begin(1, first(0.5))
    ((learnt, drafts, correct),) = planner.drafts
    assert learnt.tolist() == confidences.tolist()
    assert drafts.tolist() == [3, 1]
    assert correct.tolist() == [1, 1]


def test_only_tiers_that_hold_the_batch_are_to_choose_from() -> None:
    planner = Scripted()
    planning_of(planner, Tiers(4, LAYERS + 1)).begin(3, first(0.5, 0.5, 0.5))
    assert planner.rows_to_choose == [4, 8, 16, 20]
    planning_of(planner, Tiers(2, LAYERS + 1)).begin(11, first(*[0.5] * 11))
    assert planner.rows_to_choose == every_few(11, 55), "none does: it runs without a graph"


def test_row_counts_are_those_that_the_admitted_requests_can_have() -> None:
    """Graphs may be captured for more requests than are admitted."""
    planning = planning_of(Scripted(), Tiers(8, LAYERS + 1))
    assert planning.row_counts(3) == [1, 2, 4, 8]
    assert list(planning_of(Scripted()).row_counts(2)) == list(range(1, 11))


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 6), (64, 384), (7, 1000)])
def test_a_few_numbers_span_a_range(least: int, most: int) -> None:
    found = every_few(least, most)
    assert found[0] == least
    assert found[-1] == most
    assert found == sorted(set(found))
    assert len(found) <= 62
    between = found[1:-1]
    assert [about(size) for size in between] == between, "else one price would stand for several"
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(gap <= max(1, a / 8) for gap, a in zip(gaps, found, strict=False)), "none too far"


def test_a_step_that_serves_nobody_teaches_what_it_took_and_nothing_else() -> None:
    planner = Scripted()
    planning = planning_of(planner)

    def step() -> None:
        assert planning.begin(2, first(0.5, 0.5)).plan.layers == 3
        planning.layers_begin()
        time.sleep(0.004)
        planning.layers_end()
        draft(planning, np.full((2, 3), 0.5))
        *_, total = planning.settle(3)
        assert total == 7
        verify(planning, rows=total, milliseconds=10.0)
        planning.verified(verified_rows(4, 3), torch.tensor([2, 2]))

    for learn in (False, True):
        planning.rehearse(Plan(3, 7, 2.0, 1.0), step, learn=learn)
        assert planner.cost.verify.known == learn
    assert planner.cost.verify(7) >= 10.0
    assert planner.cost.layer(2) >= 2.0
    assert not planner.cost.rest.known
    planning.begin(2, first(0.5, 0.5))
    assert planner.times == planner.drafts == []


def test_after_a_step_that_failed_it_serves_as_before() -> None:
    planning = planning_of(Scripted(layers=2))
    with pytest.raises(ZeroDivisionError):
        planning.rehearse(Plan(3, 7, 2.0, 1.0), lambda: 1 // 0, learn=True)
    assert planning.begin(2, first(0.5, 0.5)).plan.layers == 2


def test_nothing_is_learnt_of_drafts_whose_first_one_nobody_measured() -> None:
    planner = Scripted(layers=2)
    planning = planning_of(planner)
    for unmeasured in ([1], []):
        planning.unmeasured = unmeasured
        planning.begin(2, first(0.5, 1.0))
        draft(planning, np.array([[0.5, 0.25], [1.0, 0.75]]))
        planning.verified(verified_rows(3, 2), torch.tensor([2, 2]))
    planning.begin(2, first(0.5, 0.5))
    told = [(drafts.tolist(), correct.tolist()) for _, drafts, correct in planner.drafts]
    assert told == [([2], [1]), ([2, 1], [1, 1])]


# -- a planner that fails -----------------------------------------------------------------


METHODS = ("plain_step", "choose", "settle", "learn_drafts", "learn_time")


def fallible(planner: Planner, failures: list[Exception]) -> Planning:
    planning = planning_of(planner)
    planning._failed = failures.append
    return planning


def step(planning: Planning, *, rows: tuple[int, ...] = (3, 2)) -> int:
    """A step of two requests; returns the rows of all."""
    choice = planning.begin(2, first(0.5, 0.75), plain=True)
    draft(planning, np.full((2, choice.plan.layers), 0.5))
    lens, _, total = planning.settle(choice.plan.layers)
    assert int(lens.sum()) == total
    verify(planning, rows=total)
    planning.verified(verified_rows(*rows), torch.tensor([2, 2]))
    return total


@pytest.mark.parametrize("method", METHODS)
def test_planning_when_the_planner_raises_verifies_full_drafts_and_goes_on(method: str) -> None:
    planner, failures = Scripted(layers=2, rows=3), list[Exception]()
    planning = fallible(planner, failures)
    assert [step(planning), step(planning)] == [3, 3]
    assert not planning.fell_back

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no")

    right = getattr(planner, method)
    setattr(planner, method, fail)
    for number in range(1, 4):  # each step, and nothing of it ends
        layers = 2 if method == "settle" else LAYERS
        assert step(planning) == 2 * (1 + layers)
        assert planning.fell_back
        assert len(failures) == number
    setattr(planner, method, right)
    for _ in range(2):
        planned = step(planning)
    assert planned == 3
    assert not planning.fell_back
    assert isinstance(failures[0], ZeroDivisionError)


@pytest.mark.parametrize(
    "choice",
    [
        None,
        Choice(Plan(0, 3, 1.0, 1.0), "plan"),
        Choice(Plan(LAYERS + 1, 3, 1.0, 1.0), "plan"),
        Choice(Plan(2, np.nan, 1.0, 1.0), "plan"),  # type: ignore[arg-type]
        Choice(Plan(2, 3, 1.0, 1.0, width=2), "plan"),
        Choice(Plan(2, 3, 1.0, 1.0), "plan", whole=2),
        Choice(Plan(2, 3, 1.0, 1.0), "plan", whole=-1),
        Choice(Plan(2, 3, 1.0, 1.0), "because"),
        Choice(Plan(2, 1, 1.0, 1.0), "plain"),
        Choice(Plan(2, 2 * LAYERS + 3, 1.0, 1.0), "plain"),
    ],
    ids=str,
)
def test_planning_when_the_planner_chooses_no_step_verifies_full_drafts(choice: Any) -> None:
    failures = list[Exception]()
    planner = Scripted()
    planner.choose = lambda *_, **__: choice  # type: ignore[method-assign]
    assert step(fallible(planner, failures)) == 2 * (1 + LAYERS)
    assert len(failures) == 1


@pytest.mark.parametrize("rows", [np.nan, np.inf, None, "3"])
def test_planning_when_the_planner_settles_for_no_number_verifies_full_drafts(rows: Any) -> None:
    failures = list[Exception]()
    planner = Scripted(layers=2)
    planner.settle = lambda *_: Plan(2, rows, 1.0, 1.0)  # type: ignore[method-assign]
    planning = fallible(planner, failures)
    expected = 3 if rows == "3" else 2 * (1 + 2)
    assert step(planning) == expected
    assert planning.fell_back == (rows != "3")


@pytest.mark.parametrize("raising", [0, 1])
@pytest.mark.parametrize("method", ["choose", "settle"])
def test_ranks_verify_full_drafts_together_when_the_first_ones_planner_raises(
    method: str, raising: int
) -> None:
    """And as planned where another one's does."""
    said: list[list[int]] = []
    planners = [Scripted(layers=2, rows=3) for _ in range(2)]
    plannings = [fallible(planner, []) for planner in planners]
    plannings[0].agree = lambda numbers: said.append(numbers) or numbers  # type: ignore[func-returns-value]
    plannings[1].agree = lambda _: said.pop(0)

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no")

    setattr(planners[raising], method, fail)
    choices = [planning.begin(2, first(0.5, 0.5)) for planning in plannings]
    layers = [choice.plan.layers for choice in choices]
    totals = []
    for planning in plannings:
        draft(planning, np.full((2, layers[0]), 0.5))
        totals.append(planning.settle(layers[0])[2])
    full = 2 * (1 + (LAYERS if method == "choose" else 2))
    assert totals == [full if raising == 0 else 3] * 2
    assert layers[0] == layers[1]
    assert plannings[0].fell_back == (raising == 0)


def test_a_report_that_fails_is_none_and_ends_nothing() -> None:
    planner, failures = Scripted(), list[Exception]()
    planning = fallible(planner, failures)
    assert planning.report(4) is not None
    planner.report = lambda: 1 // 0  # type: ignore[method-assign,return-value,assignment]
    assert planning.report(4) is None
    assert len(failures) == 1


STRANGE = [np.nan, np.inf, -np.inf, -1.0, 2.0]


@pytest.mark.parametrize("kind", [Survival, OneSlope])
@pytest.mark.parametrize("strange", [*STRANGE, 1.0 + 1e-6])
def test_confidences_that_are_no_probabilities_are_planned_and_teach_nothing(
    kind: type, strange: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Of any planner: they may be another policy's, or a draft's whose logits are not finite."""
    planner = Planner(LAYERS, kind(LAYERS))
    planning = planning_of(planner)
    for _ in range(2 * OneSlope.EVERY):
        choice = planning.begin(2, first(strange, 0.75))
        confidences = np.full((2, choice.plan.layers), 0.5)
        confidences[0, -1] = strange
        draft(planning, confidences)
        lens, _, total = planning.settle(choice.plan.layers)
        assert int(lens.sum()) == total
        verify(planning, rows=total)
        planning.verified(verified_rows(*lens.tolist()), torch.ones(2, dtype=torch.int32))
    told = planning.report(2)
    assert told is not None
    assert np.isfinite(planner.survival.of_chains(np.full((1, LAYERS), 0.5))).all()
    odd = strange in STRANGE or np.isnan(strange)
    assert (planning.strange > 0) == (told["strange_confidences"] > 0) == odd
    lines = [r for r in caplog.records if "no probabilities" in r.getMessage()]
    assert len(lines) == int(odd), "one line, however many there are"


# -- constrained requests -------------------------------------------------------------------


def test_constrained_requests_teach_their_like_alone() -> None:
    planner = Scripted(layers=2)
    planning = planning_of(planner)
    for constrained in ([1], [], [0, 1]):
        planning.begin(2, first(0.5, 0.75), constrained=constrained)
        draft(planning, np.array([[0.5, 0.25], [0.75, 0.5]]))
        planning.verified(verified_rows(3, 2), torch.tensor([2, 1]))
    planning.begin(2, first(0.5, 0.5))
    rows = [drafts.tolist() for _, drafts, _ in planner.drafts]
    told = [*zip(rows, planner.of_constrained, strict=True)]
    assert told == [([2], False), ([1], True), ([2, 1], False), ([2, 1], True)]


def test_each_draft_gets_rows_by_what_became_of_its_like() -> None:
    """Of two requests whose drafts look alike, the one whose drafts are rejected gets none, and
    takes none of the other's.
    """
    planner = Scripted(layers=2, rows=4)
    planning = planning_of(planner)
    for _ in range(REFRESH_EVERY):
        planning.begin(2, first(0.5, 0.5), constrained=[0])
        draft(planning, np.full((2, 2), 0.5))
        planning.verified(verified_rows(3, 3), torch.tensor([1, 3]))
        confidences = np.full((50, 2), 0.5)
        lives = np.array([0.0, 2.0]).repeat(50)
        for constrained in (True, False):
            correct = lives[:50] if constrained else lives[50:]
            Planner.learn_drafts(
                planner, confidences, np.full(50, 2.0), correct, constrained=constrained
            )
    planning.begin(2, first(0.5, 0.5), constrained=[0])
    draft(planning, np.full((2, 2), 0.5))
    assert planning.settle(2)[0].tolist() == [1, 3]
    planning.begin(2, first(0.5, 0.5), constrained=[1])
    draft(planning, np.full((2, 2), 0.5))
    assert planning.settle(2)[0].tolist() == [3, 1]
    planning.begin(2, first(0.5, 0.5))
    draft(planning, np.full((2, 2), 0.5))
    assert planning.settle(2)[0].tolist() == [2, 2]


def test_no_step_is_plain_beside_constrained_requests() -> None:
    """It would verify as many of their drafts as of all others."""
    planner = Scripted()
    planner.plain_step = lambda _: Choice(Plan(2, 6, 1.0, 1.0), "plain")  # type: ignore[method-assign,assignment,return-value]
    planning = planning_of(planner)
    assert planning.begin(2, first(0.5, 0.5), plain=True).reason == "plain"
    assert planning.begin(2, first(0.5, 0.5), plain=True, constrained=[1]).reason == "plan"

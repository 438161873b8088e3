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
from sglang_c2t.plan.survival import Survival
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.draft.planning import Planning, every_few
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
    assert told == [([2, 0], [1, 0]), ([2, 1], [1, 1])]

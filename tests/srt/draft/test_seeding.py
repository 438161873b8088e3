"""Costs are measured before the first request, in a time that has an end."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_c2t.plan.cost import size_bucket
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.survival import Survival
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.draft import seeding
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.draft.selection import ChainSelector
from tests.srt.draft.test_planning import verify

LAYERS, REQUESTS = 4, 16


class Worker:
    """Drafts and verifies as asked; a row takes ``row_ms``, the first step a second."""

    def __init__(
        self, planning: Planning, row_ms: float, request_ms: float = 0.0, token_ms: float = 0.0
    ) -> None:
        self.planning, self.row_ms, self.request_ms = planning, row_ms, request_ms
        self.token_ms = token_ms
        self.target_worker = SimpleNamespace(
            model_runner=SimpleNamespace(max_running_requests=REQUESTS)
        )
        self.speculative_num_draft_tokens = LAYERS + 1
        self.steps: list[tuple[int, int]] = []

    def forward_batch_generation(self, batch: Any) -> None:
        step = batch.spec_info.c2t_step
        assert step.plan.num_layers == LAYERS
        step.layers_begin()
        step.layers_end()
        *_, rows = self.planning.selector.select(step)
        time.sleep(0.0 if self.steps else 1.0)
        self.steps.append((step.batch, rows))
        longer = step.batch * self.request_ms + step.context * self.token_ms
        verify(step, rows, rows * self.row_ms + longer)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes time but what says so, on whatever machine."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))


def dummy(_worker: Any, requests: int, length: int) -> Any:
    return SimpleNamespace(spec_info=SimpleNamespace(), seq_lens_sum=requests * length)


@pytest.fixture(autouse=True)
def _batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_dummy_batch", dummy)


def planning_of(planner: Planner, tiers: Tiers | None) -> Planning:
    selector = ChainSelector(planner, width=LAYERS + 1, slots=REQUESTS, device="cpu")
    return Planning(planner, selector, tiers=lambda: tiers, width=LAYERS + 1, device="cpu")


def seeded(row_ms: float, tiers: Tiers | None = None, **each: float) -> Worker:
    planner = Planner(LAYERS, Survival(LAYERS))
    planning = planning_of(planner, tiers)
    worker = Worker(planning, row_ms, **each)
    seeding.seed_costs(worker.planning, worker)
    return worker


def test_seeding_measures_each_size_three_times() -> None:
    """First few that span all, then those between, some of which are as good as measured. Never
    the same twice in a row, because one slow moment would meet both. 16 requests have two contexts.
    """
    worker = seeded(0.01)
    span = [1, 2, 3, 8, 12, 24, 48, 80]
    between = [4, 5, 6, 7, 9, 10, 11, 13, 14, 15, 16, 18, 20, 22, 26, 28]
    between += [30, 32, 36, 40, 44, 52, 56, 60, 64, 72]
    fewest = lambda sizes: [(-(-rows // 5), rows) for rows in sizes]  # noqa: E731
    rounds = [*fewest(span), (4, 16), (16, 16), (16, 16)] * 3
    last = fewest(rows for rows in between if rows != 16) * 3
    assert worker.steps == [(4, 16), *rounds, *last]
    cost = worker.planning.planner.cost
    assert set(cost.verify.points) == {size_bucket(size) for size in span + between}
    assert set(cost.layer.points) == {*range(1, 17)} - {14}


@pytest.mark.parametrize("token_ms", [0.0, 0.01])
def test_seeding_tells_rows_requests_and_their_contexts_apart(token_ms: float) -> None:
    """Dummy requests with long contexts did not show what requests with short ones cost."""
    cost = seeded(2.0, request_ms=5.0, token_ms=token_ms).planning.planner.cost
    assert cost.request == pytest.approx(5.0)
    sizes = (16, 4, 0), (16, 16, 900), (64, 13, 4000), (64, 64, 0), (30, 30, 0)
    for rows, requests, context in sizes:
        wanted = rows * 2.0 + requests * 5.0 + context * token_ms
        assert cost.target(rows, requests, context) == pytest.approx(wanted, rel=0.01)


def test_seeding_measures_cuda_graphs_at_their_tiers() -> None:
    tiers = Tiers(REQUESTS, LAYERS + 1)
    rows = {rows for _, rows in seeded(0.01, tiers).steps}
    assert rows <= set(tiers.rows)
    assert {1, tiers.rows[-1]} <= rows


def test_seeding_without_time_leaves_out_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, which compiles, is not counted."""
    monkeypatch.setattr(seeding, "SECONDS", 0.6)
    began = time.perf_counter()
    worker = seeded(10.0)
    assert time.perf_counter() - began < 1.0 + 3 * 0.6, "forwards of all sizes take 20 seconds"
    measured = {rows for _, rows in worker.steps}
    assert {1, 2, 3, 8} <= measured
    assert not measured & {48, 80}


def test_seeding_leaves_out_sizes_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "DEAREST", 0.5)
    measured = {rows for _, rows in seeded(10.0).steps}
    assert 48 in measured
    assert not measured & {52, 56, 60, 64, 72, 80}
    assert {4, 5, 6, 7, 9} <= measured


def test_seeding_measures_a_slow_size_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once would be the first time, which is slow."""
    monkeypatch.setattr(seeding, "ENOUGH_SECONDS", 0.4)
    steps = Counter(rows for _, rows in seeded(10.0).steps)
    assert (steps[12], steps[24], steps[80]) == (3, 2, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_seeding_skips_costs_of_the_state_file(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The first of tensor-parallel ranks has the file, and the others do as it does."""
    planner = Planner(LAYERS, Survival(LAYERS))
    if rank == 0:
        planner.cost.verify.seed({6: 10.0})
    planning = planning_of(planner, None)

    def of_first(numbers: list[int]) -> list[int]:
        return numbers if rank == 0 else [1]

    monkeypatch.setattr(seeding, "host_broadcast_from_rank0", lambda _group: of_first)
    worker = Worker(planning, 0.01)
    seeding.seed_costs(planning, worker)
    assert worker.steps == []

"""Curves of what was measured: unmoved by single pauses, honest about kernels and age."""

from __future__ import annotations

import json
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.cost import MEMORY, SEED, STALE, STALE_AT_LAST, Curve, StepCost, size_bucket
from sglang_c2t.plan.step import StepTimes
from sglang_c2t.plan.tiers import Tiers

MEASURED = st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 100)), min_size=1, max_size=40)


def curve_of(*points: tuple[int, float]) -> Curve:
    curve = Curve()
    for size, milliseconds in points:
        curve.observe(size, milliseconds)
    return curve


@given(MEASURED)
def test_cost_curve_falls_only_after_a_size_that_was_never_faster(
    points: list[tuple[int, float]],
) -> None:
    """Before noise is taken out, which moves sizes towards their neighbours."""
    with mock.patch("sglang_c2t.plan.cost.SURE", 0.0):
        curve = curve_of(*points)
        sizes = sorted(curve.points)
    for smaller, larger in pairwise(sizes):
        if curve(smaller) > curve(larger) + 1e-9:
            measured = [ms for size, ms in points if size_bucket(size) <= smaller]
            assert len(measured) >= SEED
            mine = [ms for size, ms in points if size_bucket(size) == smaller][-MEMORY:]
            assert min(mine) > curve(larger)
    assert curve(80) >= curve(sizes[-1]) - 1e-9, "beyond what was measured nothing gets cheaper"


def test_cost_curve_few_measurements_only_lower_a_size() -> None:
    """A pause would make its cost too high, and no step would use and measure it again."""
    curve = curve_of(*[(8, 100.0)] * SEED, *[(16, 140.0)] * SEED)
    for _ in range(SEED - 1):
        curve.observe(12, 190.0)
        assert curve(12) == pytest.approx(120.0)
    curve.observe(12, 190.0)
    assert curve(12) == 190.0
    curve.observe(14, 90.0)
    assert curve(14) == 90.0


@pytest.mark.parametrize(("noise", "moved"), [(0.2, 1.0), (0.04, 0.12), (0.002, 0.0)])
def test_cost_curve_believes_a_step_between_neighbours_as_far_as_it_exceeds_the_noise(
    noise: float, moved: float
) -> None:
    """16 rows take a tenth less than the line from 8 to 24 says, as kernels and luck do."""
    spread = 1.0 + noise * np.linspace(-1.0, 1.0, 9)
    found = curve_of(
        *((n, each * ms) for each in spread for n, ms in [(8, 100), (16, 108), (24, 140)])
    )
    line, low = (found(8) + found(24)) / 2, 1.08 * found(8)
    assert (found(16) - low) / (line - low) == pytest.approx(moved, abs=0.03)


def test_cost_curve_is_linear_between_and_beyond_sizes() -> None:
    curve = curve_of((10, 5.0), (20, 7.0))
    assert [curve(size) for size in (10, 15, 20, 30)] == pytest.approx([5.0, 6.0, 7.0, 9.0])


@pytest.mark.parametrize("requests", [1, 7, 64, 256])
@pytest.mark.parametrize("width", [2, 6, 8])
def test_size_bucket_of_a_tier_is_the_tier(requests: int, width: int) -> None:
    tiers = Tiers(requests, width).rows
    rough = {requests * width}  # the largest may be any number
    assert all(size_bucket(tier) == tier for tier in {*tiers} - rough)
    sizes = range(1, 3000)
    assert all(abs(size_bucket(size) - size) <= size / 16 for size in sizes)
    assert len({size_bucket(size) for size in sizes}) < 90


def test_cost_curve_seed_counts_until_there_are_measurements() -> None:
    curve = Curve()
    assert not curve.known
    assert curve(8) == 0.0
    curve.seed({8: 7.0, 16: 8.0})
    curve.seed({8: 5.0})
    curve.seed({8: 50.0})
    assert curve.points == {8: 5.0, 16: 8.0}
    curve.observe(8, 90.0)
    curve.seed({8: 1.0})
    assert curve(8) == 5.0, "a pause is no news, and a seed none behind a measurement"
    curve.observe(8, 4.0)
    assert curve(8) == 4.0
    curve.observe(8, 6.0)
    assert curve(8) == 4.0
    for _ in range(3):
        curve.observe(8, 6.0)
    assert curve(8) == 6.0, "the low quartile of what was measured"


def test_cost_curve_stale_size_believes_its_next_measurement() -> None:
    curve = curve_of(*[(4, 900.0)] * 9)
    for _ in range(STALE):
        curve.step()
        curve.observe(8, 1.0)
    assert curve.stale([4, 8]) == []
    curve.step()
    assert curve.stale([4, 8]) == [4]
    assert curve.stale([8, 16]) == [], "what was never measured is drawn from the others"
    assert curve.unknown([8, 16]) == [16]
    curve.observe(4, 0.5)
    assert curve(4) == 0.5
    assert curve.stale([4, 8]) == []


def test_cost_curve_stale_age_grows_with_the_server() -> None:
    curve = Curve()

    def goes_on(steps: int) -> None:
        for _ in range(steps):
            curve.step()

    goes_on(3 * STALE)
    curve.observe(8, 20.0)
    goes_on(3 * STALE)
    assert curve.stale([8]) == []
    goes_on(1)
    assert curve.stale([8]) == [8]
    goes_on(STALE_AT_LAST)
    curve.observe(8, 20.0)
    goes_on(STALE_AT_LAST + 1)
    assert curve.stale([8]) == [8]


def observe(
    cost: StepCost,
    *,
    rows: int,
    verify_ms: float,
    draft_ms: float,
    rest_ms: float | None = None,
    **step: int,
) -> None:
    """A step, of requests or, without a rest, of dummies."""
    step_ms = None if rest_ms is None else verify_ms + draft_ms + rest_ms
    cost.observe(StepTimes(rows, verify_ms, draft_ms, step_ms), **step)


def test_step_cost_is_the_sum_of_its_parts() -> None:
    cost = StepCost()
    observe(cost, rows=12, batch=4, layers=2, verify_ms=10.0, draft_ms=4.0, rest_ms=3.0)
    observe(cost, rows=24, batch=8, layers=1, verify_ms=14.0, draft_ms=0.0, rest_ms=5.0)
    assert cost.one(12, 4, 5) == pytest.approx(10 + 4 * 4 + 3)
    assert cost.one(24, 8, 0) == cost.one(24, 8, 1) == pytest.approx(19)
    again = StepCost()
    again.restore(json.loads(json.dumps(cost.state())))
    assert again.one(18, 6, 3) == pytest.approx(cost.one(18, 6, 3))


def served(cost: StepCost, rows: int, verify_ms: float, steps: int = 1) -> None:
    for _ in range(steps):
        observe(
            cost, rows=rows, batch=1, layers=1, verify_ms=verify_ms, draft_ms=0.0, rest_ms=0.0
        )  # fmt: skip


@pytest.mark.parametrize("pace", [0.6, 1.5])
def test_step_cost_unvisited_rows_follow_the_slowdown(pace: float) -> None:
    cost = StepCost()
    served(cost, 16, 100.0, 9)
    served(cost, 32, 180.0, 9)
    served(cost, 16, 100.0 * pace, 5)
    assert cost.one(16, 1, 1) == pytest.approx(100 * pace, rel=0.06)
    assert cost.one(32, 1, 1) == pytest.approx(180 * pace, rel=0.06)
    served(cost, 24, 140.0 * pace)
    assert cost.one(24, 1, 1) == pytest.approx(140 * pace, rel=0.06), "of the same moment"
    assert list(cost(np.array([16, 32]), 1, [1])[0]) == [cost.one(n, 1, 1) for n in (16, 32)]
    again = StepCost()
    again.restore(json.loads(json.dumps(cost.state())))
    assert again.one(32, 1, 1) == pytest.approx(cost.one(32, 1, 1))


@given(st.integers(0, 20))
def test_step_cost_is_stable_under_noise(seed: int) -> None:
    """Each follows the other: of noise alone, with pauses, neither may make anything."""
    rng = np.random.default_rng(seed)
    cost = StepCost()
    for _ in range(1500):
        rows = int(rng.choice([4, 4, 4, 8, 16]))
        pause = 3.0 if rng.uniform() < 0.05 else 1.0
        served(cost, rows, (20.0 + 5 * rows) * pause * float(np.exp(rng.exponential(0.1))))
    for rows in (4, 8, 16):
        true = 20.0 + 5 * rows
        assert cost.verify(rows) == pytest.approx(true, rel=0.3)
        assert cost.verify(rows) / cost.verify(4) == pytest.approx(true / 40.0, rel=0.15)


def behind(cost: StepCost, rows: int, context: int, verify_ms: float) -> None:
    observe(
        cost, rows=rows, batch=1, layers=1, verify_ms=verify_ms, draft_ms=0.0, rest_ms=0.0,
        context=context,
    )  # fmt: skip


@given(st.integers(0, 20), st.floats(0.0, 0.05))
def test_step_cost_separates_contexts_from_rows_and_slowdown(seed: int, noise: float) -> None:
    """When traffic becomes long, unvisited sizes get right costs as well."""
    rng = np.random.default_rng(seed)
    cost = StepCost()
    true = lambda rows, context: 5.0 + 0.05 * rows + context / 4000  # noqa: E731
    for per_request in (300, 1000):
        for _ in range(300):
            rows = int(rng.choice([32, 64, 128]))
            context = 32 * per_request + int(rng.integers(2000))
            slow = float(np.exp(noise * rng.normal()))
            behind(cost, rows, context, true(rows, context) * slow)
    for _ in range(300):
        context = 32 * 4000 + int(rng.integers(2000))
        behind(cost, 32, context, true(32, context) * float(np.exp(noise * rng.normal())))
    assert 4000 * cost.context.per_token == pytest.approx(1.0, abs=0.02 + noise)
    for rows in (32, 64, 128):
        price = cost.one(rows, 1, 1, context=32 * 4000)
        assert price == pytest.approx(true(rows, 32 * 4000), rel=0.15)
    more = cost.one(128, 1, 1, context=32 * 4000) - cost.one(32, 1, 1, context=32 * 4000)
    assert more < 3 * 96 * 0.05, "as a slow machine it would be seven times that"


def test_step_cost_of_a_request_is_told_from_that_of_its_rows_and_restored() -> None:
    """Seeded in few requests, then served in many: rows do not seem to cost what requests do."""
    cost, true = StepCost(), lambda rows, batch: 10.0 + 2.0 * rows + 5.0 * batch
    for rows, batch in ((16, 3), (16, 16), (32, 6), (64, 11)):
        warm_up = StepTimes(rows, true(rows, batch), 0.0)
        cost.observe(warm_up, batch=batch, layers=1, dummy=True)
    again = StepCost()
    again.restore(cost.state())
    for one in (cost, again):
        assert one.target(64, 32, 0) == pytest.approx(true(64, 32))
        for _ in range(5):
            step = StepTimes(32, true(32, 32), 0.0, true(32, 32) + 1.0)
            one.observe(step, batch=32, layers=1)
        assert one.slowdown.now == pytest.approx(1.0)
        assert one.target(64, 32, 0) == pytest.approx(true(64, 32))
        assert one.target(64, 11, 0) == pytest.approx(true(64, 11))
    assert StepCost().request == 0.0


def test_step_before_other_work_teaches_its_forwards_alone() -> None:
    cost = StepCost()
    cost.observe(StepTimes(24, 30.0, 8.0), batch=8, layers=3)
    cost.observe(StepTimes(8, 20.0, 6.0, extends=2), batch=8, layers=0)
    points = {name: each for name, each in cost.state().items() if each}
    assert points == {
        "verify": {8: 20.0, 24: 30.0}, "layer": {8: 4.0}, "draft_free_extend": {8: 3.0}
    }  # fmt: skip


def test_step_cost_of_contexts_is_restored() -> None:
    cost = StepCost()
    for context in (1000, 2000, 4000, 8000) * 5:
        behind(cost, 16, context, 10.0 + context / 1000)
    again = StepCost()
    again.restore(json.loads(json.dumps(cost.state())))
    told = cost.one(16, 1, 1, context=3000)
    assert again.one(16, 1, 1, context=3000) == pytest.approx(told)
    for context in (1000, 2000, 4000, 8000) * 20:
        behind(again, 16, context, 10.0 + context / 500)
    assert again.context(1000) == pytest.approx(2.0, rel=0.05)
    with pytest.raises(ValueError, match="context holds"):
        StepCost().restore({"verify": {}, "layer": {}, "rest": {}, "context": {"1000": -1.0}})


def test_step_cost_of_uniform_steps_is_their_own() -> None:
    """Until they were measured they cost what other steps do."""
    cost = StepCost()
    observe(cost, rows=12, batch=4, layers=2, verify_ms=10.0, draft_ms=4.0, rest_ms=3.0)
    assert cost.one(12, 4, 2, uniform=True) == cost.one(12, 4, 2) == pytest.approx(17)
    for _ in range(3):
        assert not cost.uniform_measured(4)
        cost.observe(StepTimes(12, 10.0, 2.0, 13.0), batch=4, layers=2, uniform=True)
    assert cost.one(12, 4, 2, uniform=True) == pytest.approx(13)
    assert cost.one(12, 4, 2) == pytest.approx(17)
    assert cost.uniform_measured(4)


def test_step_cost_of_a_uniform_step_is_never_above_that_of_a_planned_one() -> None:
    """It does less. One measured in a slow moment would otherwise be the last one made."""
    cost = StepCost()
    cost.observe(StepTimes(12, 10.0, 2.0, 17.0), batch=4, layers=2)
    cost.observe(StepTimes(12, 10.0, 6.0, 30.0), batch=4, layers=2, uniform=True)
    assert cost.one(12, 4, 2, uniform=True) == cost.one(12, 4, 2)


def test_step_cost_rest_is_the_median() -> None:
    """A layer is as fast as it can be; beside it a step takes what it mostly takes."""
    cost = StepCost()
    for ms in (10.0, 11.0, 12.0, 13.0, 90.0):
        observe(cost, rows=8, batch=4, layers=2, verify_ms=10.0, draft_ms=ms, rest_ms=ms)
    assert (cost.verify(8), cost.layer(4), cost.rest(4)) == (10.0, 11.0, 12.0)


@pytest.mark.parametrize("points", [{"0": 1.0}, {"4": -1.0}, {"4": 1e9}, {"4": float("nan")}])
def test_step_cost_invalid_state_is_refused(points: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="layer holds"):
        StepCost().restore({"verify": {}, "layer": points, "rest": {}})

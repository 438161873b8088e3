"""What a server learns about its load, and what it decides from it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.load import DraftDepth, Line, PackingRule


def steps_after(depth: DraftDepth, lens: list[int], times: int = 60) -> int:
    """Layers drafted once a server has seen batches like this for a while."""
    for _ in range(times):
        depth.observe([min(length, depth.steps + 1) for length in lens], depth.steps)
    return depth.steps


def test_a_server_starts_with_all_layers() -> None:
    assert DraftDepth([2, 4, 6]).steps == 6


def test_layers_that_nobody_reaches_are_no_longer_drafted() -> None:
    assert steps_after(DraftDepth([1, 2, 4, 6]), [1] * 8) == 1
    assert steps_after(DraftDepth([1, 2, 4, 6]), [2] * 8) == 2
    assert steps_after(DraftDepth([1, 2, 4, 6]), [3] * 8) == 4


def test_layers_come_back_one_choice_at_a_time_when_drafts_get_longer() -> None:
    depth = DraftDepth([1, 2, 4, 6])
    assert steps_after(depth, [1] * 8) == 1
    seen = {depth.steps}
    for _ in range(60):
        depth.observe([depth.steps + 1] * 8, depth.steps)
        seen.add(depth.steps)
    assert depth.steps == 6
    assert seen == {1, 2, 4, 6}


def test_a_few_long_drafts_among_many_do_not_keep_the_batch_drafting() -> None:
    lens = [2] * 63 + [7]
    assert steps_after(DraftDepth([1, 2, 4, 6], least_alive=0.1), lens) == 2
    assert steps_after(DraftDepth([1, 2, 4, 6], least_alive=0.01), lens) == 6


def test_the_length_does_not_swing_around_the_threshold() -> None:
    """Shares between half the threshold and the threshold keep whatever is drafted."""
    rng = random.Random(0)
    depth = DraftDepth([1, 2, 3], least_alive=0.2)
    for _ in range(50):
        depth.observe([4] * 16, 3)
    for _ in range(300):
        depth.observe([3 if rng.random() < 0.15 else 2 for _ in range(64)], 3)
        assert depth.steps == 3


@given(
    st.sets(st.integers(1, 8), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=30),
)
def test_only_choices_are_ever_drafted(choices: set[int], batches: list[list[int]]) -> None:
    depth = DraftDepth(choices)
    for lens in batches:
        depth.observe([min(length, depth.steps + 1) for length in lens], depth.steps)
        assert depth.steps in choices


def test_ranks_that_see_the_same_decide_the_same() -> None:
    ranks = [DraftDepth([2, 4, 6]) for _ in range(2)]
    rng = random.Random(1)
    for _ in range(200):
        lens = [rng.randint(1, 7) for _ in range(5)]
        for rank in ranks:
            rank.observe([min(length, rank.steps + 1) for length in lens], rank.steps)
        assert ranks[0].steps == ranks[1].steps


def test_a_line_is_found_and_followed_when_it_moves() -> None:
    line = Line(memory=0.9)
    assert line.coefficients() == (0.0, 0.0)
    line.observe(4, 8.0)
    assert line.coefficients() == (0.0, 0.0)  # one x says nothing about the slope
    for rows in (8, 64, 256) * 20:
        line.observe(rows, 5.0 + 0.01 * rows)
    assert line.coefficients() == pytest.approx((5.0, 0.01), rel=1e-2)
    for rows in (8, 64, 256) * 60:
        line.observe(rows, 6.0 + 0.02 * rows)
    assert line.coefficients() == pytest.approx((6.0, 0.02), rel=1e-2)


def test_the_error_of_a_slope_is_that_of_least_squares() -> None:
    """Against the textbook's formula; every observation counts alike here."""
    rng = random.Random(3)
    line, rows = Line(memory=1.0), [8, 16, 64, 96, 256] * 6
    assert line.slope_error() is None
    took = [5.0 + 0.02 * x + rng.gauss(0, 0.3) for x in rows]
    for x, y in zip(rows, took, strict=True):
        line.observe(x, y)
    fixed, slope = line.coefficients()
    left = sum((y - fixed - slope * x) ** 2 for x, y in zip(rows, took, strict=True))
    mean = sum(rows) / len(rows)
    spread = sum((x - mean) ** 2 for x in rows)
    expected = (left / (len(rows) - 2) / spread) ** 0.5
    assert line.slope_error() == pytest.approx(expected, rel=1e-6)


def test_packing_is_tried_before_anything_is_known() -> None:
    assert PackingRule().pays(100, 99)


def test_packing_pays_where_the_rows_it_saves_cost_more_than_the_wait() -> None:
    rule = PackingRule()
    for rows in (8, 64, 256) * 5:
        rule.forward_took(rows, 5.0 + 0.01 * rows)
    for _ in range(100):
        rule.waited(0.4)
    per_row, wait = rule.measured
    assert (per_row, wait) == (pytest.approx(0.01), pytest.approx(0.4))
    rule.decide_on(per_row, wait)
    assert rule.pays(6 * 64, 3 * 64)  # 1.9 ms against 0.4
    assert not rule.pays(6 * 2, 3 * 2)  # 0.06 ms against 0.4


def test_free_rows_are_never_worth_a_wait() -> None:
    """Small batches are bound by weights: a forward takes as long for 8 rows as for 64."""
    rule = PackingRule()
    rule.decide_on(0.0, 0.3)
    assert not rule.pays(64, 8)

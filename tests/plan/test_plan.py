"""The plan against trying everything, and against situations whose answer is plain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.plan import best_of, every_plan, expected_by_layer, expected_gains


def chains(rng: np.random.Generator, requests: int, depth: int) -> np.ndarray:
    return np.cumprod(rng.uniform(0.2, 1.0, (requests, depth)), axis=1)


def free(rows: np.ndarray, _batch: int, depths: Sequence[int]) -> np.ndarray:
    return np.ones((len(depths), len(rows)))


def prices(rows_ms: Callable, layer_ms: float = 0.0) -> Callable:
    """Costs of ``rows_ms(rows)`` a step, and ``layer_ms`` a layer."""
    return lambda rows, _, depths: rows_ms(rows) + layer_ms * np.array(depths)[:, None]


def slowly(survival: np.ndarray, cost, depths, tiers) -> float:
    """Oracle: the best rate over every depth, every number of rows, each in its tier."""
    batch, best = len(survival), 0.0
    for layers in depths:
        drafts = sorted(survival[:, :layers].flatten().tolist(), reverse=True)
        for rows in range(batch, batch + len(drafts) + 1):
            fitting = [tier for tier in tiers if tier >= rows]
            if fitting:
                tokens = batch + sum(drafts[: rows - batch])
                best = max(best, tokens / cost(np.array(fitting[:1]), batch, [layers]).item())
    return best


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5))
def test_best_plan_has_the_highest_rate(seed: int, batch: int, depth: int) -> None:
    """On stairs up and down; so deep, and so many rows, that all would fit."""
    rng = np.random.default_rng(seed)
    survival = chains(rng, batch, depth)
    tiers = sorted({*rng.integers(1, 40, 6).tolist(), batch * (depth + 1)})
    steps = rng.uniform(1, 20, len(tiers))
    cost = prices(lambda rows: steps[np.searchsorted(tiers, rows)], rng.uniform(0, 3))
    depths = range(depth + 1)
    plans = every_plan(survival, batch, cost, depths=depths, tiers=tiers)
    found = best_of(plans.best_of_each_depth())
    assert found.rate == pytest.approx(slowly(survival, cost, depths, tiers))
    assert batch <= found.rows <= batch * (found.layers + 1)


def test_best_plan_without_a_tier_for_the_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 requests, and no tier of more than 8 rows"):
        every_plan(np.ones((9, 1)), 9, free, depths=[0, 1], tiers=[4, 8])


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_expected_gains_of_samples_equal_repeated_requests(
    seed: int, samples: int, depth: int, times: int
) -> None:
    """A batch of each sample several times gains what the samples say."""
    survival = chains(np.random.default_rng(seed), samples, depth)
    repeated = np.repeat(survival, times, axis=0)
    drafts = sorted(repeated.flatten().tolist(), reverse=True)
    expected = [0.0, *itertools.accumulate(drafts)]
    counts = np.arange(len(expected))
    assert expected_gains(survival, samples * times, counts) == pytest.approx(expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.data())
def test_drafts_expected_by_layer_are_those_that_a_plan_verifies(
    seed: int, requests: int, depth: int, data: st.DataObject
) -> None:
    """Ranked by one survival, counted by another; against picking them one by one."""
    rng = np.random.default_rng(seed)
    ranked, survival = chains(rng, requests, depth), chains(rng, requests, depth)
    drafts = data.draw(st.integers(0, requests * depth))
    places = [*np.ndindex(ranked.shape)]
    best = sorted(places, key=lambda place: -ranked[place])[:drafts]
    expected = [sum(survival[b, d] for b, d in best if d == layer) for layer in range(depth)]
    assert expected_by_layer(survival, ranked, requests, drafts) == pytest.approx(expected)


def test_best_plan_that_fills_a_tier() -> None:
    """Two layers of three requests fill 8 rows, one does not, and three drafts are behind it."""
    survival = np.array([[0.9, 0.5, 0.1]] * 3)
    cost = prices(lambda rows: 10 + rows, 1.0)
    plans = every_plan(survival, 3, cost, depths=[1, 2, 3], tiers=[3, 6, 8, 12])
    tier, plan = plans.best_that_fills([8, 12])
    assert (tier, plan.layers, plan.rows) == (8, 2, 8)
    assert plan.tokens == pytest.approx(3 + 3 * 0.9 + 2 * 0.5)
    assert plan.milliseconds == pytest.approx(20.0)
    tier, plan = plans.best_that_fills([12])
    assert (tier, plan.layers, plan.rows) == (12, 3, 12)
    assert plans.best_that_fills([]) is None


def test_best_plan_that_fills_a_tier_with_padding() -> None:
    survival = np.array([[0.9, 0.5]] * 3)
    plans = every_plan(survival, 3, free, depths=[1, 2], tiers=[4, 16, 32])
    found = plans.best_that_fills([16])
    assert found is not None
    assert (found[0], found[1].rows) == (16, 9)
    assert plans.best_that_fills([32]) is None, "nobody pads so far"

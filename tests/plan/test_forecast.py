"""Continuations are drawn from what came next, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.forecast import Continuations, Forecast
from sglang_c2t.plan.survival import OneSlope, Survival

DEPTH = 4


def chains(rng: np.random.Generator, batch: int, layers: int) -> np.ndarray:
    return rng.uniform(0.01, 0.99, (batch, layers))


def firsts(rng: np.random.Generator, batch: int) -> np.ndarray:
    return chains(rng, batch, 1)[:, 0]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 16]))
def test_continuations_follow_chains_of_the_same_bin(seed: int, samples: int) -> None:
    """Each drawn confidence followed, at its depth, one in the same bin as that before it."""
    rng = np.random.default_rng(seed)
    seen = Continuations(DEPTH, num_bins=3, memory=1000)
    learnt = chains(rng, 30, DEPTH)
    for part in np.split(learnt, [7, 8]):
        seen.observe(part)
    bins = lambda values: np.digitize(np.log(values / (1 - values)), [-2.0, 2.0])  # noqa: E731
    drawn = seen.drawn(firsts(rng, 5), samples)
    assert drawn.shape == (5 * samples, DEPTH)
    for depth in range(1, DEPTH):
        for last, found in drawn[:, depth - 1 : depth + 1]:
            before = learnt[:, depth - 1]
            followers = learnt[bins(before) == bins(np.array(last)), depth]
            assert found in followers if len(followers) else found == last


def test_continuations_draw_evenly() -> None:
    """Half of the chains went well and half did not: so do the draws."""
    seen = Continuations(2)
    seen.observe(np.array([[0.8, 0.9], [0.8, 0.1]] * 8))
    drawn = seen.drawn(np.array([0.8]), 16)
    assert sorted(drawn[:, 1]) == pytest.approx([0.1] * 8 + [0.9] * 8)


def test_continuations_forget_old_chains() -> None:
    seen = Continuations(2, memory=4)
    seen.observe(np.array([[0.8, 0.1]] * 4))
    seen.observe(np.array([[0.8, 0.9]] * 4))
    assert (seen.drawn(np.array([0.8]), 8)[:, 1] == 0.9).all()


def test_continuations_of_trees_are_full_layers() -> None:
    seen = Continuations(3, width=2)
    sure, unsure = [[0.9, 0.5], [0.8, 0.4], [0.7, 0.0]], [[0.2, 0.1], [0.1, 0.0], [0.0, 0.0]]
    seen.observe(np.array([sure, unsure]))
    assert seen.drawn(np.array([sure[0], unsure[0]]), 2).tolist() == [sure, sure, unsure, unsure]
    strange = [0.99, 0.4]
    assert seen.drawn(np.array([strange]), 1).tolist() == [[strange] * 3], "nothing like it"


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 40))
def test_forecast_equals_the_survival_of_its_continuations(
    seed: int, batch: int, most: int
) -> None:
    """Result of a multiplying estimator: the first survival, times the factors after the middle
    of its bin.
    """
    rng = np.random.default_rng(seed)
    seen, estimator = Continuations(DEPTH), OneSlope(DEPTH)
    seen.observe(chains(rng, 30, DEPTH))
    forecast = Forecast(seen, estimator.of_chains, samples=8)
    begun = firsts(rng, batch)
    found = forecast(begun, most).reshape(batch, -1, DEPTH)
    ways = found.shape[1]
    assert ways == min(max(most // batch, 1), 8)
    typical = seen.typical()[seen.places(begun)]
    drawn = estimator.accepts(1 + np.arange(DEPTH), seen.drawn(typical, 8))
    turns = [[(b + way * (8 // ways)) % 8 for way in range(ways)] for b in range(batch)]
    drawn = np.take_along_axis(drawn.reshape(batch, 8, DEPTH), np.array(turns)[..., None], axis=1)
    drawn[:, :, 0] = estimator.accepts(np.ones(1, dtype=int), begun[:, None])
    assert found == pytest.approx(drawn.cumprod(axis=2))


@pytest.mark.parametrize("most", [8, 16, 64])
def test_forecast_of_equal_drafts_uses_every_continuation(most: int) -> None:
    """However few each has: were they the same few, a batch would share their luck."""
    seen, survival = Continuations(DEPTH), Survival(DEPTH)
    seen.observe(chains(np.random.default_rng(0), 200, DEPTH))
    forecast = Forecast(seen, survival.of_chains, samples=8)
    all_ways = forecast(np.array([0.8]), 8).mean(axis=0)
    assert forecast(np.full(8, 0.8), most).mean(axis=0) == pytest.approx(all_ways)


def test_forecast_is_cached_until_refresh() -> None:
    seen, survival = Continuations(2), Survival(2)
    forecast = Forecast(seen, survival.of_chains, samples=2)
    begun = np.array([0.8])
    before = forecast(begun, 2)
    seen.observe(np.array([[0.8, 0.1]] * 4))
    assert (forecast(begun, 2) == before).all()
    forecast.refresh()
    assert (forecast(begun, 2)[:, 1] < before[:, 1]).all()

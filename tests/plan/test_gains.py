"""Gains over the forecast, by layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.gains import Gains, gained


def test_gain_of_a_layer_is_among_requests_whose_draft_before_it_was_accepted() -> None:
    """Half of the first drafts survive, not a quarter; of these half the second ones, as was
    forecast. The third layer was not drafted, and gains as much as the second.
    """
    gains = Gains(3)
    for step in range(300):
        forecast = np.array([0.25, 0.125])
        gains.learn(step, np.array([0.5, 0.25]), forecast, constrained=False)
    first, second, third = gains.of_layers(constrained=False)
    assert 1.7 < first < 2.0
    assert second == pytest.approx(first)
    assert third == second
    assert gains.of_layers(constrained=True).tolist() == [1.0] * 3


def test_gain_of_few_steps_is_small() -> None:
    gains = Gains(2)
    gains.learn(1, np.array([1.0]), np.array([0.5]), constrained=True)
    assert 1.0 < gains.of_layers(constrained=True)[0] <= 1.2


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 3))
def test_gained_survival_falls_from_layer_to_layer(seed: int, depth: int, nodes: int) -> None:
    """That of chains, and of trees whose layers hold several nodes."""
    rng = np.random.default_rng(seed)
    shape = (4, depth, nodes) if nodes else (4, depth)
    factors = rng.uniform(0.2, 3.0, depth)
    survival = np.minimum.accumulate(rng.uniform(size=shape), axis=1)
    found = gained(survival, factors)
    best = found.reshape(4, depth, -1).max(axis=2)
    assert found.shape == survival.shape
    assert best.max() <= 1.0
    assert (np.diff(best, axis=1) <= 0.0).all()
    assert np.array_equal(gained(survival, np.ones(depth)), survival)

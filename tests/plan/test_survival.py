"""Calibration while serving: against counting by hand, and against traffic that is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.survival import OneSlope, Survival, as_probabilities, rising


def drawn(rng: np.random.Generator, n: int, depths: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(1, depths + 1, n), rng.uniform(0.01, 0.99, n)


def test_survival_before_learning_is_the_confidence() -> None:
    depth, confidence = drawn(np.random.default_rng(0), 500, 3)
    assert Survival(3)(depth, confidence) == pytest.approx(confidence, abs=0.02)


def test_survival_calibrates_by_depth() -> None:
    """Drafts survive with the square of their confidence at depth 1, the cube at depth 2."""
    rng, survival = np.random.default_rng(1), Survival(2)
    for _ in range(200):
        depth, confidence = drawn(rng, 100, 2)
        truth = confidence ** (depth + 1)
        survival.observe(depth, confidence, rng.random(100) < truth)
    depth, confidence = drawn(rng, 4000, 2)
    error = np.abs(survival(depth, confidence) - confidence ** (depth + 1))
    assert error.mean() < 0.02


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.data())
def test_rising_equals_isotonic_regression(values: list[float], data: st.DataObject) -> None:
    """As scipy does, which a server does not import."""
    from scipy.optimize import isotonic_regression

    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(values), max_size=len(values)))
    found = rising(np.array(values), np.array(weights))
    assert found == pytest.approx(isotonic_regression(values, weights=weights).x, abs=1e-9)


@given(st.integers(0, 2**32 - 1))
def test_survival_rises_with_the_confidence(seed: int) -> None:
    rng, survival = np.random.default_rng(seed), Survival(3)
    depth, confidence = drawn(rng, 300, 3)
    survival.observe(depth, confidence, rng.random(300) < 0.5)
    for row in (1, 2, 3):
        values = survival(np.full(99, row), np.linspace(0, 1, 99))
        assert (np.diff(values) >= 0).all()
        assert ((values >= 0) & (values <= 1)).all()


def test_survival_state_is_restored() -> None:
    rng, survival = np.random.default_rng(3), Survival(2)
    depth, confidence = drawn(rng, 500, 2)
    survival.observe(depth, confidence, rng.random(500) < confidence**3)
    again = Survival(2)
    again.restore(json.loads(json.dumps(survival.state())))
    assert (again.values == survival.values).all()
    again.reset()
    assert (again.values == Survival(2).values).all()


@pytest.mark.parametrize("spoil", [lambda c: c[:, :, 1:], lambda c: c - 1, lambda c: c * np.nan])
def test_survival_invalid_state_is_refused(spoil) -> None:
    survival = Survival(2)
    with pytest.raises(ValueError, match="counts"):
        survival.restore({"counts": spoil(np.zeros((2, 2, 24))).tolist()})


# -- vLLM's estimator --------------------------------------------------------------------------


def test_one_slope_waits_a_hundred_steps() -> None:
    estimator = OneSlope(3)
    for _ in range(99):
        estimator.observe(np.array([1]), np.array([0.5]), np.array([1]))
    assert (estimator.slope, estimator.intercepts.tolist()) == (0.5, [-0.2] * 3)
    estimator.observe(np.array([1]), np.array([0.5]), np.array([1]))
    assert estimator.intercepts[0] > -0.2
    assert estimator.intercepts[1] == pytest.approx(-0.2, abs=0.3)


def test_one_slope_finds_the_line_of_the_labels() -> None:
    rng, estimator = np.random.default_rng(4), OneSlope(2)
    slope, intercepts = 0.8, np.array([0.3, -0.6])
    for _ in range(3000):
        depth, prob = drawn(rng, 32, 2)
        odds = slope * np.log(prob / (1 - prob)) + intercepts[depth - 1]
        estimator.observe(depth, prob, rng.random(32) < 1 / (1 + np.exp(-odds)))
    assert estimator.slope == pytest.approx(slope, abs=0.1)
    assert estimator.intercepts == pytest.approx(intercepts, abs=0.15)


def test_as_probabilities_clips_and_names_strange_values() -> None:
    said = [0.0, 0.25, 1.0, 1.0 + 1e-7, -1.0, 2.0, np.inf, -np.inf, np.nan]
    inside, strange = as_probabilities(np.array(said, dtype=np.float32))
    assert inside.tolist() == [0.0, 0.25, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert strange.tolist() == [False] * 4 + [True] * 5

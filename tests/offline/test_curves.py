"""Comparison at equal accept length: against curves small enough to read off by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.curves import Curve, everyone, interval, resamples, sweep
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.fixed import Fixed
from tests.recordings import chain, recording

ONE = np.array([[1.0]])


def curve(points: list[tuple[float, float]]) -> Curve:
    """One request of 100 steps; each point is (tau, gamma)."""
    correct = np.array([[100 * (tau - 1)] for tau, _ in points])
    verified = np.array([[100 * gamma] for _, gamma in points])
    return Curve(np.full_like(correct, 100.0), correct, verified, verified)


def test_compare_gamma_is_interpolated_between_thresholds() -> None:
    """Whatever order the thresholds come in."""
    found = curve([(3.0, 4.0), (2.0, 1.0)])
    assert found.gamma_at(np.array([2.5]), ONE) == pytest.approx(2.5)
    assert found.gamma_at(np.array([3.0]), ONE) == pytest.approx(4.0)


def test_compare_takes_the_cheapest_threshold() -> None:
    """A curve may turn back: (2.9, 9.0) drafts more than (3.0, 4.0) and accepts less."""
    found = curve([(2.0, 1.0), (3.0, 4.0), (2.9, 9.0)])
    assert found.gamma_at(np.array([2.9, 3.0]), ONE[[0, 0]]) == pytest.approx([4.0, 4.0])


def test_compare_sweep_reaches_the_accept_length_of_full_drafts() -> None:
    """However unlikely a draft is that the target accepts; else intervals would have no end."""
    unlikely = [
        chain([1e-5, 1e-5, 1e-5], [1, 1, q % 2], request=f"a/{q}", position=5) for q in range(4)
    ]
    table = Chains.from_recording(recording(unlikely, roots="every"))
    drawn = resamples(["a"] * 4, 50)
    whole = Curve.of([replay(Fixed(), table)])
    gammas = sweep(DyJoint, table).gamma_at(whole.tau(drawn)[:, 0], drawn)
    assert np.array_equal(gammas, whole.gamma(drawn)[:, 0])


def test_compare_threshold_at_an_accept_length() -> None:
    found = curve([(3.0, 4.0), (2.0, 1.0)])
    assert found.threshold_at(2.5, [0.2, 0.6], ONE) == pytest.approx(0.4)
    assert found.threshold_at(3.0, [0.2, 0.6], ONE) == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"no threshold gives 3\.100 tokens"):
        found.threshold_at(3.1, [0.2, 0.6], ONE)


def test_compare_sums_requests_before_dividing() -> None:
    """A request of 300 steps weighs three times one of 100."""
    both = Curve(*(np.array([[100.0, 300.0]]), np.array([[100.0, 0.0]]),
                   np.array([[200.0, 300.0]]), np.array([[0.0, 0.0]])))  # fmt: skip
    assert both.tau(np.array([[1.0, 1.0]]))[0, 0] == pytest.approx(1.25)
    assert both.gamma(np.array([[1.0, 1.0]]))[0, 0] == pytest.approx(1.25)
    assert both.tau(np.array([[1.0, 0.0]]))[0, 0] == pytest.approx(2.0)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 5))
def test_compare_resamples_keep_group_sizes(groups: list[str], num: int) -> None:
    drawn = resamples(groups, num)
    assert drawn.shape == (num, len(groups))
    for group in set(groups):
        members = everyone(groups, only=group)[0]
        assert (drawn @ members == members.sum()).all()
    assert interval(np.arange(101.0)) == pytest.approx((2.5, 97.5))

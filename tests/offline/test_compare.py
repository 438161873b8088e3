"""Comparison at equal accept length: against curves small enough to read off by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.baselines import Entropy
from sglang_c2t.offline.compare import (
    ENTROPY_GRID,
    ODDS_GRID,
    Curve,
    everyone,
    interval,
    replay_text,
    resamples,
    sweep,
)
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


def chains() -> Chains:
    """Two requests of three roots each; probabilities tell acceptance well, not perfectly."""
    drafts = [
        chain([0.9, 0.8, 0.3], [1, 1, 0], request=f"a/{q}", position=5 + root)
        for q in range(2)
        for root in range(3)
    ]
    return Chains.from_recording(recording(drafts, roots="every"))


def test_gamma_is_interpolated_between_thresholds() -> None:
    """Whatever order the thresholds come in."""
    found = curve([(3.0, 4.0), (2.0, 1.0)])
    assert found.gamma_at(np.array([2.5]), ONE) == pytest.approx(2.5)
    assert found.gamma_at(np.array([3.0]), ONE) == pytest.approx(4.0)


def test_of_thresholds_that_reach_an_accept_length_the_cheapest_counts() -> None:
    """A curve may turn back: (2.9, 9.0) drafts more than (3.0, 4.0) and accepts less."""
    found = curve([(2.0, 1.0), (3.0, 4.0), (2.9, 9.0)])
    assert found.gamma_at(np.array([2.9, 3.0]), ONE[[0, 0]]) == pytest.approx([4.0, 4.0])


def test_an_accept_length_that_is_never_reached_has_no_gamma() -> None:
    assert np.isnan(curve([(2.0, 1.0), (3.0, 4.0)]).gamma_at(np.array([3.1]), ONE)[0])


@pytest.mark.parametrize(("rule", "grid"), [(DyJoint, ODDS_GRID), (Entropy, ENTROPY_GRID)])
def test_every_curve_reaches_what_whole_drafts_reach(rule: type, grid: tuple[float, ...]) -> None:
    """However unlikely a draft is that the target accepts; else intervals would have no end."""
    unlikely = [
        chain([1e-5, 1e-5, 1e-5], [1, 1, q % 2], request=f"a/{q}", position=5) for q in range(4)
    ]
    table = Chains.from_recording(recording(unlikely, roots="every"))
    drawn = resamples(["a"] * 4, 50)
    whole = Curve.of([replay(Fixed(), table)])
    gammas = sweep(rule, table, grid).gamma_at(whole.tau(drawn)[:, 0], drawn)
    assert np.array_equal(gammas, whole.gamma(drawn)[:, 0])


def test_a_threshold_is_read_where_the_curve_reaches_the_accept_length() -> None:
    found = curve([(3.0, 4.0), (2.0, 1.0)])
    assert found.threshold_at(2.5, [0.2, 0.6], ONE) == pytest.approx(0.4)
    assert found.threshold_at(3.0, [0.2, 0.6], ONE) == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"no threshold gives 3\.100 tokens"):
        found.threshold_at(3.1, [0.2, 0.6], ONE)


def test_totals_are_summed_before_they_are_divided() -> None:
    """A request of 300 steps weighs three times one of 100."""
    both = Curve(*(np.array([[100.0, 300.0]]), np.array([[100.0, 0.0]]),
                   np.array([[200.0, 300.0]]), np.array([[0.0, 0.0]])))  # fmt: skip
    assert both.tau(np.array([[1.0, 1.0]]))[0, 0] == pytest.approx(1.25)
    assert both.gamma(np.array([[1.0, 1.0]]))[0, 0] == pytest.approx(1.25)
    assert both.tau(np.array([[1.0, 0.0]]))[0, 0] == pytest.approx(2.0)


def test_a_sweep_replays_every_threshold() -> None:
    table = chains()
    swept = sweep(DyJoint, table, [0.5, 0.95])
    once = everyone(["a", "a"])
    for i, beta in enumerate((0.5, 0.95)):
        outcome = replay(DyJoint(beta), table)
        assert swept.tau(once)[0, i] == pytest.approx(outcome.accept_length())
        assert swept.gamma(once)[0, i] == pytest.approx(outcome.gamma())


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 5))
def test_resampling_keeps_the_size_of_every_group(groups: list[str], num: int) -> None:
    drawn = resamples(groups, num)
    assert drawn.shape == (num, len(groups))
    for group in set(groups):
        members = everyone(groups, only=group)[0]
        assert (drawn @ members == members.sum()).all()


def test_an_interval_holds_the_middle_of_its_values() -> None:
    assert interval(np.arange(101.0)) == pytest.approx((2.5, 97.5))


def test_the_text_compares_a_rule_with_the_joint_probability_at_its_own_accept_length() -> None:
    """A rule compared with itself differs by nothing."""
    text = replay_text(chains(), "mine", DyJoint(0.5), {"fixed": Fixed(2)})
    assert "2 requests, chains of up to 3" in text
    assert "| fixed | 3.000 | 2.000 | 3.000 |" in text
    assert "(+0.0 %)" in text or "(-0.0 %)" in text


def test_a_rule_that_keeps_nothing_has_no_rival() -> None:
    assert "at no threshold" in replay_text(chains(), "mine", Fixed(0), {})
    assert torch.equal(replay(Fixed(0), chains()).num_proposed, torch.zeros(2).double())

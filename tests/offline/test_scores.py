"""Scores of a confidence: worked examples, and slow versions in plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.scores import Rates, expected_calibration_error, rates, reliability

SCORED = st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), max_size=40)


def test_rates_of_a_worked_example() -> None:
    """3 kept, 2 of them accepted; 4 accepted in all; 5 of 8 decided rightly."""
    kept = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]).bool()
    accepted = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0]).bool()
    assert rates(kept, accepted) == Rates(
        accuracy=5 / 8, precision=2 / 3, recall=2 / 4, f1=4 / 7, positive_rate=3 / 8
    )


@given(SCORED)
def test_reliability_bins_hold_what_a_loop_puts_there(pairs: list[tuple[float, bool]]) -> None:
    scores = torch.tensor([score for score, _ in pairs])
    labels = torch.tensor([float(label) for _, label in pairs])
    found = reliability(scores, labels, num_bins=4)
    for i, bin_ in enumerate(found):
        inside = [
            (score, label)
            for score, label in pairs
            if i / 4 <= score < (i + 1) / 4 or (score == 1 and i == 3)
        ]
        assert (bin_.low, bin_.high, bin_.tokens) == (i / 4, (i + 1) / 4, len(inside))
        if inside:
            assert bin_.mean_score == pytest.approx(sum(s for s, _ in inside) / len(inside))
            assert bin_.accept_rate == pytest.approx(sum(a for _, a in inside) / len(inside))
        else:
            assert math.isnan(bin_.mean_score)
            assert math.isnan(bin_.accept_rate)


def test_the_calibration_error_is_the_mean_gap_of_the_reliability_bins() -> None:
    g = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(500, generator=g), torch.rand(500, generator=g).round()
    gaps = [
        b.tokens * abs(b.mean_score - b.accept_rate)
        for b in reliability(scores, labels)
        if b.tokens
    ]
    assert expected_calibration_error(scores, labels) == pytest.approx(sum(gaps) / 500, abs=1e-6)

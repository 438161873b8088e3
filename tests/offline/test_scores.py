"""Scores of a confidence against slow versions in plain loops; rates: see test_evaluation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.scores import expected_calibration_error, reliability

SCORED = st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), max_size=40)


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

"""The calibration error against its definition; AUC: see test_train."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.scores import expected_calibration_error

SCORED = st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=40)


@given(SCORED)
def test_expected_calibration_error_equals_its_definition(pairs: list[tuple[float, bool]]) -> None:
    scores = torch.tensor([score for score, _ in pairs])
    labels = torch.tensor([float(label) for _, label in pairs])
    gap = 0.0
    for i in range(4):
        inside = [
            (score, label)
            for score, label in pairs
            if i / 4 <= score < (i + 1) / 4 or (score == 1 and i == 3)
        ]
        gap += abs(sum(score - label for score, label in inside))
    found = expected_calibration_error(scores, labels, num_bins=4)
    assert found == pytest.approx(gap / len(pairs), abs=1e-6)

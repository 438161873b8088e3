"""tau and gamma are ratios of sums, checked by hand."""

import pytest

from eval.metrics import SpecTotals


def meta(verify: int, correct: int, proposed: int) -> dict[str, int]:
    return {
        "spec_verify_ct": verify,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
    }


def test_ratios_are_taken_over_the_sums() -> None:
    """A mean of per-request ratios would give tau 2.25 here."""
    totals = SpecTotals.from_meta_infos([meta(1, 2, 5), meta(4, 2, 8)])
    assert totals.accept_length == pytest.approx((5 + 4) / 5)
    assert totals.gamma == pytest.approx(13 / 5)


def test_requests_that_were_never_verified_count_nothing_and_alone_have_no_ratios() -> None:
    assert SpecTotals.from_meta_infos([{}, meta(2, 1, 4)]) == SpecTotals(2, 1, 4)
    totals = SpecTotals.from_meta_infos([{}, {}])
    assert totals.accept_length is totals.gamma is None


def test_a_half_reported_request_is_an_error() -> None:
    """A missing counter must not turn into a result."""
    with pytest.raises(KeyError):
        SpecTotals.from_meta_infos([{"spec_verify_ct": 3}])

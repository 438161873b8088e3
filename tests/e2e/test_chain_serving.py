"""A ``--c2t`` server gives the very tokens that the server without speculation gives."""

from __future__ import annotations

import pytest

from sglang_c2t.client import differing
from tests.e2e.conftest import (
    GatedServer,
    run_beside_aborts,
    verified,
    verified_rows_reported,
)
from tests.e2e.server_policies import FAILS, MODES


@pytest.mark.parametrize("mode", MODES)
def test_greedy_outputs_equal_those_without_speculation(
    gated: GatedServer, expected: list[tuple[int, ...]], mode: str
) -> None:
    """For the classifier, full drafts, no drafts and random lengths per request and step."""
    result = gated.run(mode)
    assert differing(result.outputs, expected) == []


def test_a_policy_that_raises_now_and_then_costs_no_answer_and_no_server(
    gated: GatedServer, expected: list[tuple[int, ...]]
) -> None:
    """Its drafts go on whole, and the log says so once."""
    result = gated.run(FAILS)
    assert differing(result.outputs, expected) == []
    lines = gated.server.log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "and drafts stay whole where it does" in line]
    assert len(said) == 1
    assert "RuntimeError: this policy was told to fail (" in said[0]


@pytest.mark.parametrize("mode", MODES)
def test_the_target_forwards_exactly_the_surviving_rows(gated: GatedServer, mode: str) -> None:
    """Rows counted in attention, in the model's forward, and reported per request agree."""
    before = gated.server.c2t_state()
    result = gated.run(mode)
    after = gated.server.c2t_state()
    rows = after["counters"]["verify_rows"] - before["counters"]["verify_rows"]
    attention = after["attention_verify_rows"] - before["attention_verify_rows"]
    assert rows == attention == verified_rows_reported(result.answers)


def test_no_draft_forward_runs_when_every_chain_has_ended(gated: GatedServer) -> None:
    """A gate that keeps nothing leaves the target one row per request and step."""
    before = gated.server.c2t_state()["counters"]
    result = gated.run("none")
    after = gated.server.c2t_state()["counters"]
    assert after["draft_forwards"] == before["draft_forwards"]
    assert after["draft_forwards_skipped"] > before["draft_forwards_skipped"]
    assert {a.meta_info["spec_cap_length"] for a in result.answers if verified(a)} == {1.0}


def test_the_gate_shortens_drafts_and_lengths_differ(gated: GatedServer) -> None:
    """Otherwise the equalities above would prove nothing about ragged batches."""
    answers = gated.run("c2t").answers
    histogram = [0] * 7
    for answer in filter(verified, answers):
        for length, count in enumerate(answer.meta_info["spec_cap_lens_histogram"]):
            histogram[length] += count
    assert sum(1 for count in histogram if count) >= 4, histogram
    assert sum(i * n for i, n in enumerate(histogram)) < 6 * sum(histogram)


@pytest.mark.parametrize("mode", MODES)
def test_meta_info_reports_the_drafts_that_were_really_proposed(
    gated: GatedServer, mode: str
) -> None:
    for answer in filter(verified, gated.run(mode).answers):
        meta = answer.meta_info
        histogram = meta["spec_cap_lens_histogram"]
        proposed = sum((length - 1) * count for length, count in enumerate(histogram) if count)
        assert sum(histogram) == meta["spec_verify_ct"]
        assert meta["spec_num_proposed_drafts"] == proposed
        correct = meta["spec_num_correct_drafts"]
        assert meta["spec_accept_rate"] == pytest.approx(correct / proposed if proposed else 0.0)


def test_aborted_requests_leave_the_others_untouched(
    gated: GatedServer, expected: list[tuple[int, ...]]
) -> None:
    """Requests that join, are aborted mid-draft and leave, among ones that are checked."""
    assert differing(run_beside_aborts(gated).outputs, expected) == []

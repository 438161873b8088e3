"""A ``--c2t`` server gives the very tokens that the server without speculation gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sglang_c2t.offline.client import LoadResult, differing
from tests.e2e.conftest import (
    GatedServer,
    replace_text,
    run_beside_aborts,
    verified,
    verified_rows_reported,
)
from tests.e2e.server_policies import FAILS, MODES


@dataclass(frozen=True)
class Served:
    """All of BODIES in one mode, and the server's state on either side of it."""

    result: LoadResult
    before: dict[str, Any]
    after: dict[str, Any]

    def counted(self, name: str) -> int:
        """How much a counter grew meanwhile."""
        grown: int = self.after["counters"][name] - self.before["counters"][name]
        return grown


Runs = Callable[[str], Served]


@pytest.fixture(scope="module")
def runs(gated: GatedServer) -> Runs:
    """One load per mode, shared by the tests that look at different sides of it."""

    @functools.cache
    def served(mode: str) -> Served:
        before = gated.server.c2t_state()
        result = gated.run(mode)
        return Served(result, before, gated.server.c2t_state())

    return served


@pytest.mark.parametrize("mode", MODES)
def test_greedy_outputs_equal_those_without_speculation(
    runs: Runs, expected: list[tuple[int, ...]], mode: str
) -> None:
    """For the classifier, full drafts, no drafts and random lengths per request and step."""
    assert differing(runs(mode).result.outputs, expected) == []


def test_a_policy_that_raises_now_and_then_costs_no_answer_and_no_server(
    gated: GatedServer, expected: list[tuple[int, ...]]
) -> None:
    """Its drafts go on whole, and the log says so once."""
    result = gated.run(FAILS)
    assert differing(result.outputs, expected) == []
    lines = gated.server.log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "so the server verifies full drafts there" in line]
    assert len(said) == 1
    assert "RuntimeError: this policy was told to fail (" in said[0]


@pytest.mark.parametrize("mode", MODES)
def test_the_target_forwards_exactly_the_surviving_rows(runs: Runs, mode: str) -> None:
    """Rows counted in attention, in the model's forward, and reported per request agree."""
    served = runs(mode)
    attention = served.after["attention_verify_rows"] - served.before["attention_verify_rows"]
    reported = verified_rows_reported(served.result.answers)
    assert served.counted("verify_rows") == attention == reported


@pytest.mark.parametrize("mode", MODES)
def test_only_a_gate_that_keeps_nothing_saves_draft_forwards(runs: Runs, mode: str) -> None:
    """It leaves the target one row per request and step."""
    served = runs(mode)
    if mode != "none":
        assert served.counted("draft_forwards") > 0
        return
    assert served.counted("draft_forwards") == 0
    assert served.counted("draft_forwards_skipped") > 0
    answers = served.result.answers
    assert {a.meta_info["spec_cap_length"] for a in answers if verified(a)} == {1.0}


@pytest.mark.parametrize("mode", MODES)
def test_the_lengths_of_drafts_differ_as_the_gate_decides(runs: Runs, mode: str) -> None:
    """Otherwise the equalities above would prove nothing about ragged batches."""
    served = runs(mode)
    histogram = [0] * 7
    for answer in filter(verified, served.result.answers):
        for length, count in enumerate(answer.meta_info["spec_cap_lens_histogram"]):
            histogram[length] += count
    seen = {length for length, count in enumerate(histogram) if count}
    if mode in ("full", "none"):
        assert seen == {6 if mode == "full" else 1}
    else:
        assert len(seen) >= 4, histogram
        assert sum(i * n for i, n in enumerate(histogram)) < 6 * sum(histogram)


@pytest.mark.parametrize("mode", MODES)
def test_meta_info_reports_the_drafts_that_were_really_proposed(runs: Runs, mode: str) -> None:
    served = runs(mode)
    for answer in filter(verified, served.result.answers):
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
    replace_text(gated.control, "random")
    assert differing(run_beside_aborts(gated.server).outputs, expected) == []

"""A ``--c2t`` server of chains gives the tokens that the server without speculation gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_c2t.offline.client import LoadResult, differing, run_load
from tests.e2e.conftest import (
    BODIES,
    CONCURRENCY,
    GatedServer,
    verified,
    verified_rows_reported,
)
from tests.e2e.server_policies import FAILS, MODES

ON_EACH_DRAFT = {"EAGLE3": MODES, "EAGLE": ("random",), "STANDALONE": ("random",)}
"""Modes of the gate by draft kind: only drafting differs between the kinds."""


@dataclass(frozen=True)
class Served:
    """All of BODIES in one mode, and the server's state before and after."""

    result: LoadResult
    before: dict[str, Any]
    after: dict[str, Any]

    def counted(self, name: str) -> int:
        """Growth of a counter during the load."""
        grown: int = self.after["counters"][name] - self.before["counters"][name]
        return grown


@dataclass(frozen=True)
class Runs:
    """One load per mode, shared by the tests that check different parts of it."""

    gated: GatedServer
    done: dict[str, Served] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Served]]:
        for mode in ON_EACH_DRAFT[self.gated.algorithm]:
            if mode not in self.done:
                before = self.gated.server.c2t_state()
                result = self.gated.run(mode)
                self.done[mode] = Served(result, before, self.gated.server.c2t_state())
            yield mode, self.done[mode]


@pytest.fixture(scope="module")
def runs(gated: GatedServer) -> Runs:
    return Runs(gated)


def test_greedy_outputs_equal_those_without_speculation(
    runs: Runs, expected: list[tuple[int, ...]]
) -> None:
    """For the classifier, full drafts, no drafts and random lengths per request and step."""
    for mode, served in runs:
        assert differing(served.result.outputs, expected) == [], mode


def test_the_target_forwards_exactly_the_surviving_rows(runs: Runs) -> None:
    """Rows counted in attention, in the model's forward, and reported per request agree."""
    for mode, served in runs:
        attention = served.after["attention_verify_rows"] - served.before["attention_verify_rows"]
        reported = verified_rows_reported(served.result.answers)
        assert served.counted("verify_rows") == attention == reported, mode


def test_only_a_gate_that_keeps_nothing_saves_draft_forwards(runs: Runs) -> None:
    """It leaves the target one row per request and step."""
    for mode, served in runs:
        if mode != "none":
            assert served.counted("draft_forwards") > 0, mode
            continue
        assert served.counted("draft_forwards") == 0
        assert served.counted("draft_forwards_skipped") > 0
        answers = served.result.answers
        assert {a.meta_info["spec_cap_length"] for a in answers if verified(a)} == {1.0}


def test_the_lengths_of_drafts_differ_as_the_gate_decides(runs: Runs) -> None:
    """Otherwise the equalities above would prove nothing about ragged batches."""
    for mode, served in runs:
        histogram = [0] * 7
        for answer in filter(verified, served.result.answers):
            for length, count in enumerate(answer.meta_info["spec_cap_lens_histogram"]):
                histogram[length] += count
        seen = {length for length, count in enumerate(histogram) if count}
        if mode in ("full", "none"):
            assert seen == {6 if mode == "full" else 1}
        else:
            assert len(seen) >= 4, (mode, histogram)
            assert sum(i * n for i, n in enumerate(histogram)) < 6 * sum(histogram)


def test_meta_info_reports_the_drafts_that_were_really_proposed(runs: Runs) -> None:
    for _, served in runs:
        for answer in filter(verified, served.result.answers):
            meta = answer.meta_info
            histogram = meta["spec_cap_lens_histogram"]
            proposed = sum((length - 1) * count for length, count in enumerate(histogram) if count)
            assert sum(histogram) == meta["spec_verify_ct"]
            assert meta["spec_num_proposed_drafts"] == proposed
            correct = meta["spec_num_correct_drafts"]
            assert meta["spec_accept_rate"] == pytest.approx(correct / proposed if proposed else 0)


@pytest.mark.parametrize("gated", ["EAGLE3"], indirect=True)
def test_a_policy_that_raises_now_and_then_costs_no_answer_and_no_server(
    gated: GatedServer, expected: list[tuple[int, ...]]
) -> None:
    """The server verifies full drafts then, and logs the failure once."""
    result = gated.run(FAILS)
    assert differing(result.outputs, expected) == []
    lines = gated.server.log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "so the server verifies full drafts there" in line]
    assert len(said) == 1
    assert "RuntimeError: this policy was told to fail (" in said[0]


@pytest.mark.parametrize("gated", ["EAGLE", "STANDALONE"], indirect=True)
def test_planned_chains_of_other_drafts_give_the_same_outputs(
    gated: GatedServer, expected: list[tuple[int, ...]]
) -> None:
    """A STANDALONE draft has a KV cache of its own, which short steps fill as well."""
    gated.server.switch(policy="auto")
    gated.server.flush_cache()
    assert run_load(gated.server.url, BODIES, concurrency=CONCURRENCY).outputs == expected
    assert gated.server.c2t_state()["planner"]["steps"] > 30

"""A ``--c2t`` server that verifies trees gives what the server without speculation gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval.server import running
from sglang_c2t.offline.client import LoadResult, differing, greedy
from tests.e2e.conftest import (
    TREE,
    GatedServer,
    notes_of,
    tree_launch,
    verified,
    verified_rows_reported,
)
from tests.e2e.mixed_load import FLAGS, RETRACTING
from tests.e2e.server_policies import FAILS

N = TREE["num_draft_tokens"]
MODES = {
    "full": "full",
    "none": "none",
    "random": "random",
    FAILS: FAILS,
    "c2t": '{"policy": "c2t"}',
}
"""Trees of full size, of the root alone, of random sizes, and of the classifier's.

`test_tree_replay.py` compares the other policies' trees with a replay.
"""


@dataclass(frozen=True)
class Served:
    """All of BODIES under one policy, and the growth of the server's counters."""

    result: LoadResult
    rows: int  # of the target's verify forwards
    attention_rows: int  # that reached its attention in them
    draft_forwards: int
    skipped: int  # draft forwards
    verified: list[list[int]]  # sizes of the trees of each verify forward


@pytest.fixture(scope="module")
def trees(logs: Path) -> Iterator[GatedServer]:
    launch, control = tree_launch("EAGLE3", logs, *FLAGS)
    with running(launch, logs) as server:
        yield GatedServer(server, "EAGLE3", control)


@pytest.fixture(scope="module")
def runs(trees: GatedServer) -> dict[str, Served]:
    """One load per mode, shared by the tests that check different parts of it."""
    return {name: served(trees, mode) for name, mode in MODES.items()}


def served(gated: GatedServer, mode: str) -> Served:
    """Serve BODIES in ``mode`` and read the counters before and after."""
    before = gated.server.c2t_state()
    with Notes(gated) as folder:
        result = gated.run(mode)
        forwards = verified_sizes(folder)
    after = gated.server.c2t_state()
    rows, drafts, skipped, verifies = (
        after["counters"][name] - before["counters"][name]
        for name in ("verify_rows", "draft_forwards", "draft_forwards_skipped", "verify_forwards")
    )
    assert verifies == len(forwards)
    attention = after["attention_verify_rows"] - before["attention_verify_rows"]
    return Served(result, rows, attention, drafts, skipped, forwards)


# -- the same tokens ----------------------------------------------------------------------


def test_greedy_outputs_equal_those_without_speculation(
    runs: dict[str, Served], expected: list[tuple[int, ...]]
) -> None:
    """16 at a time, of different lengths, so that requests leave and join at every step."""
    for mode, run in runs.items():
        assert differing(run.result.outputs, expected) == [], mode


def test_the_target_forwards_the_nodes_of_the_trees_and_nothing_else(
    runs: dict[str, Served],
) -> None:
    """Rows counted in attention, in the model's forward, and reported per request agree."""
    for mode, run in runs.items():
        reported = verified_rows_reported(run.result.answers)
        assert run.rows == run.attention_rows == reported > 0, mode
        assert run.rows == sum(map(sum, run.verified)), mode


def test_trees_have_the_sizes_that_their_policy_gives_them(runs: dict[str, Served]) -> None:
    """Otherwise the equalities above would prove little about trees of different size."""
    fixed = {"full": N, "none": 1}
    for mode, run in runs.items():
        seen = {size for batch in run.verified for size in batch}
        if mode in fixed:
            assert seen == {fixed[mode]}, mode
        else:
            assert len(seen) >= 8, (mode, seen)
            mixed = [batch for batch in run.verified if len(set(batch)) >= 2]
            assert len(mixed) > len(run.verified) / 4, mode


def test_no_draft_forward_runs_when_every_tree_is_its_root(runs: dict[str, Served]) -> None:
    assert runs["none"].draft_forwards == 0
    assert runs["none"].skipped > 0


def test_trees_are_really_walked(runs: dict[str, Served]) -> None:
    """Random trees have more than one accepted draft in every second verification."""
    answers = [a for a in runs["random"].result.answers if verified(a)]
    drafts = sum(a.meta_info["spec_num_correct_drafts"] for a in answers)
    assert drafts > sum(a.meta_info["spec_verify_ct"] for a in answers) / 2


class Notes:
    """Folder in which the server records what it verifies, see ``verify_recorder.py``."""

    def __init__(self, gated: GatedServer) -> None:
        self._folder = notes_of(gated.control)

    def __enter__(self) -> Path:
        self._folder.mkdir()
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


def verified_sizes(folder: Path) -> list[list[int]]:
    """Sizes of the trees of each forward."""
    return [json.loads(line) for line in (folder / "sizes.jsonl").read_text().splitlines()]


# -- a budget of rows, and retraction -----------------------------------------------------


def test_no_forward_exceeds_the_budget_of_the_batch_and_retracted_outputs_stay(
    logs: Path, expected: list[tuple[int, ...]]
) -> None:
    """16 requests share 40 rows and a small KV pool, and SGLang retracts every third step."""
    budget = 40
    flags = ("--c2t-max-verify-rows", str(budget), "--max-total-tokens", "2600")
    launch, control = tree_launch("budgeted", logs, *flags, env=RETRACTING)
    with running(launch, logs) as server:
        assert "exact ancestors" in server.log.read_text()
        for mode in ("full", "random"):
            run = served(GatedServer(server, "EAGLE3", control), mode)
            assert differing(run.result.outputs, expected) == []
            assert sum(answer.meta_info["num_retractions"] for answer in run.result.answers) > 0
            assert run.rows == sum(map(sum, run.verified)) == run.attention_rows
            assert all(sum(batch) <= max(budget, len(batch)) for batch in run.verified)
            if mode == "full":  # else the budget need not bite
                assert all(sum(batch) == min(budget, N * len(batch)) for batch in run.verified)
        server.flush_cache()  # an idle server checks its memory
        assert server.process.poll() is None
        assert server.generate(**greedy("A", 4))["meta_info"]["completion_tokens"] > 0

"""A planner that raises costs the saving of its steps, and ends no server, on one rank or two."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from eval.server import Launch, running, speculative_flags
from sglang_c2t.offline.client import differing, run_load
from tests.e2e.conftest import BODIES, REPOSITORY, series
from tests.e2e.test_planned_serving import TREE
from tests.e2e.test_unusual_servers import BIND

SHAPES = {"chains": ({}, "BrokenJoint"), "trees": (TREE, "BrokenTrees")}


@pytest.mark.parametrize(("kind", "ranks"), [("chains", 1), ("trees", 1), ("chains", 2)])
def test_a_planner_that_raises_leaves_full_drafts_and_every_output_as_it_was(
    logs: Path, expected: list[tuple[int, ...]], kind: str, ranks: int
) -> None:
    """Whatever it is asked or told, and of two ranks on each at other times."""
    shape, policy = SHAPES[kind]
    flags = (*speculative_flags("EAGLE3", **shape), "--c2t", "--enable-metrics", "--c2t-policy",
             f"tests.e2e.server_policies:{policy}", "--tp-size", str(ranks))  # fmt: skip
    env = {"PYTHONPATH": str(REPOSITORY), **(BIND if ranks > 1 else {})}
    with running(Launch(f"broken-{kind}-{ranks}", flags, env=env), logs) as server:
        for _ in range(20):
            requests.get(f"{server.url}/c2t", timeout=60).raise_for_status()
        outputs = run_load(server.url, BODIES, concurrency=6).outputs
        if ranks == 1:  # else sums are rounded in another order
            assert differing(outputs, expected) == []
        counted = series(server.url)
        assert counted["c2t:plans_totalfailed"] > 10
        assert counted["c2t:policy_failures_total"] >= counted["c2t:plans_totalfailed"]
        assert counted["c2t:policy_failures_total"] < counted["c2t:steps_total"]
    lines = [line for line in server.log.read_text().splitlines() if "was told to fail" in line]
    assert len(lines) == ranks, "one line a process"
    assert "the server verifies full drafts there" in lines[0]

"""One server of several schedulers: SGLang's data-parallel ranks, and two nodes of one model."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from eval import server as servers
from eval.server import Launch, Server, environment, running, speculative_flags
from sglang_c2t.offline.client import run_load
from sglang_c2t.offline.servers import free_port, stop
from sglang_c2t.srt.draft.state_file import EVERY_IF_ASKED
from tests.e2e.conftest import BODIES, CONCURRENCY, END_SECONDS, assert_counted, counted, series
from tests.e2e.mixed_load import FLAGS, RETRACTING, LosslessnessSuite
from tests.e2e.test_unusual_servers import BIND

RANKS = 0, 1
PLANNED = (*speculative_flags("EAGLE3"), "--c2t", *FLAGS)


@pytest.fixture(scope="module")
def state_file(logs: Path) -> Path:
    return logs / "learnt-by-two.json"


@pytest.fixture(scope="module")
def replicas(logs: Path, state_file: Path) -> Iterator[Server]:
    """Start two whole models behind SGLang's own controller, which serves them in turn."""
    flags = (*PLANNED, "--dp-size", "2", "--enable-metrics", "--c2t-state", str(state_file))
    with running(Launch("dp2", flags, env={**BIND, **RETRACTING}), logs) as server:
        yield server


def to_rank(rank: int, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**body, "routed_dp_rank": rank} for body in bodies]


def settings(server: Server) -> dict[str, Any]:
    told: dict[str, Any] = requests.get(f"{server.url}/c2t", timeout=60).json()
    return told


def test_requests_spread_over_replicas_are_answered_as_without_speculation(
    replicas: Server, suite: LosslessnessSuite
) -> None:
    suite.run(replicas)
    result = run_load(replicas.url, BODIES, concurrency=CONCURRENCY)
    assert {answer.meta_info["dp_rank"] for answer in result.answers} == set(RANKS)
    assert all(planner["steps"] > 0 for planner in settings(replicas)["planner"])


def test_each_replica_counts_what_it_served_and_nothing_else(replicas: Server) -> None:
    for rank, other in (RANKS, RANKS[::-1]):
        replicas.flush_cache()
        before, others = (series(replicas.url, dp_rank=str(r)) for r in (rank, other))
        result = run_load(replicas.url, to_rank(rank, BODIES[:12]), concurrency=6)
        assert_counted(replicas.url, before, result.answers, dp_rank=str(rank))
        assert series(replicas.url, dp_rank=str(other)) == others


def test_a_change_reaches_every_replica(replicas: Server, expected: list[tuple[int, ...]]) -> None:
    """A threshold that cuts nearly all: a replica that had not heard of it would verify more."""
    before = settings(replicas)["switches"]
    replicas.switch(policy="c2t-plus", beta=0.9)
    told = settings(replicas)
    assert (told["policy"], told["beta"]) == ("c2t-plus", 0.9)
    assert told["switches"] == [times + 1 for times in before]
    rows = []
    for rank in RANKS:
        replicas.flush_cache()
        result = run_load(replicas.url, to_rank(rank, BODIES), concurrency=CONCURRENCY)
        assert result.outputs == expected
        told = counted(result.answers)
        rows.append(told["c2t:proposed_drafts_total"] / told["c2t:verifications_total"])
    # About, as retraction has some drafts made anew. Whole ones have 5 rows.
    assert rows[0] == pytest.approx(rows[1], rel=0.1)
    assert max(rows) < 4
    replicas.switch(policy="auto")


def test_one_replica_keeps_what_is_learnt(replicas: Server, state_file: Path) -> None:
    """Two that wrote into one file would each undo the other's."""
    run_load(replicas.url, to_rank(1, BODIES[:6]), concurrency=6)
    time.sleep(EVERY_IF_ASKED)  # since the last GET
    first, second = (planner["cost_ms"] for planner in settings(replicas)["planner"])
    assert first != second
    assert json.loads(state_file.read_text())["planner"]["cost"] == first


@pytest.mark.extended
def test_two_nodes_of_one_model_give_the_outputs_of_one(
    logs: Path, suite: LosslessnessSuite
) -> None:
    """Two tensor-parallel ranks, each started by itself; the second takes no requests. Where it
    dies the first ends too, and no client waits for a rank that never answers.
    """
    address = f"127.0.0.1:{free_port()}"
    first, second = (
        Launch(f"node-{node}", (*PLANNED, "--tp-size", "2", "--nnodes", "2", "--node-rank",
               str(node), "--dist-init-addr", address), env={**BIND, **RETRACTING})
        for node in (0, 1)
    )  # fmt: skip
    log = logs / "node-1.log"
    process = servers.start(second.argv(free_port()), environment(second.env), log)
    try:
        with running(first, logs) as server:
            for policy in ("auto", "c2t-plus"):
                server.switch(policy=policy)
                suite.run(server)
            assert settings(server)["switches"] == [2]
            assert process.poll() is None
            os.killpg(process.pid, signal.SIGKILL)
            with pytest.raises(requests.ConnectionError):
                server.generate(timeout=END_SECONDS, **BODIES[1])
            assert server.process.wait(timeout=END_SECONDS) != 0
    finally:
        stop(process)

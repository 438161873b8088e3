"""A server that plans its steps: same answers, what it learnt is told, kept and forgotten."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import differing, run_load
from tests.e2e.conftest import (
    BODIES,
    CONSTRAINED_BODIES,
    LOGPROB_BODIES,
    assert_same_logprobs,
    run_beside_aborts,
    run_beside_posts,
    series,
    verified,
    verified_rows_reported,
)


@dataclass(frozen=True)
class Planned:
    """A server that plans: ``--c2t`` alone for chains, ``--c2t-policy auto`` for trees."""

    server: Server
    state: Path

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = requests.get(f"{self.server.url}/c2t", timeout=60).json()
        return found


TREE = {"num_steps": 5, "topk": 4, "num_draft_tokens": 16}


@pytest.fixture(scope="module")
def planned_trees(logs: Path) -> Iterator[Planned]:
    state = logs / "tree-planner.json"
    flags = ("--c2t", "--c2t-policy", "auto", "--c2t-state", str(state))
    launch = Launch("planned-trees", (*speculative_flags("EAGLE3", **TREE), *flags))
    with running(launch, logs) as server:
        yield Planned(server, state)


@pytest.fixture(scope="module")
def planned(logs: Path) -> Iterator[Planned]:
    state = logs / "planner.json"
    state.write_text('{"version": 1, "planner": "of a server that died while writing"')
    flags = ("--c2t", "--c2t-state", str(state), "--enable-metrics")
    launch = Launch("planned", (*speculative_flags("EAGLE3"), *flags))
    with running(launch, logs) as server:
        yield Planned(server, state)


def test_chains_are_planned_where_no_policy_was_named(planned: Planned) -> None:
    assert planned.told()["policy"] == "auto"


def test_planned_chains_of_a_standalone_draft_give_the_same_outputs(
    logs: Path, expected: list[tuple[int, ...]]
) -> None:
    """It has a KV cache of its own, which steps of fewer layers fill as well."""
    launch = Launch("planned-standalone", (*speculative_flags("STANDALONE"), "--c2t"))
    with running(launch, logs) as server:
        for concurrency in (1, 4, len(BODIES)):
            server.flush_cache()
            bodies = BODIES[:4] if concurrency == 1 else BODIES
            answered = run_load(server.url, bodies, concurrency=concurrency).outputs
            assert answered == expected[: len(bodies)]
        (told,) = requests.get(f"{server.url}/c2t", timeout=60).json()["planner"]
    assert told["steps"] > 100


def test_outputs_are_those_without_speculation_at_every_load(
    planned: Planned, expected: list[tuple[int, ...]]
) -> None:
    bodies = copy.deepcopy(BODIES)
    for body in bodies[::5]:  # these want their whole drafts verified
        body["sampling_params"]["custom_params"] = {"c2t": False}
    for concurrency in (4, len(bodies)):
        planned.server.flush_cache()
        assert run_load(planned.server.url, bodies, concurrency=concurrency).outputs == expected


def test_where_scoring_costs_more_than_it_brings_steps_are_uniform_and_outputs_the_same(
    planned: Planned, expected: list[tuple[int, ...]]
) -> None:
    """With so small a target it does: it is trained for tests, not for speed."""
    for _ in range(6):
        assert run_load(planned.server.url, BODIES, concurrency=4).outputs == expected
        if series(planned.server.url)["c2t:plans_totaluniform"] > 20:
            return
    pytest.fail("no step was uniform")


def test_policies_that_plan_and_others_take_turns_during_requests(
    planned: Planned, expected: list[tuple[int, ...]]
) -> None:
    posts = [{"policy": name} for name in ("rows-only", "c2t-plus", "auto", "fixed", "auto")]
    planned.server.flush_cache()
    result, switches = run_beside_posts(planned.server.url, posts, {})
    assert result.outputs == expected
    assert switches > len(posts)
    planned.server.switch(policy="auto")


def test_what_it_learnt_is_told_and_kept(planned: Planned) -> None:
    run_load(planned.server.url, BODIES, concurrency=4)
    (told,) = planned.told()["planner"]
    assert told["steps"] > 20
    assert len(told["calibration_error"]) == 5
    curves = told["cost_ms"]
    assert all(curves[name] for name in ("verify", "layer", "rest", "uniform_rest"))
    assert 0.3 < told["predicted_over_measured"] < 3
    kept = json.loads(planned.state.read_text())
    assert kept["learnt_on"]["policy"] == "auto"
    assert kept["planner"]["cost"]["verify"].keys() == curves["verify"].keys()
    log = planned.server.log.read_text()
    assert "the planner starts cold" in log
    assert "C2T: measured for" in log


def test_the_planner_forgets_on_command_and_only_a_planner(planned: Planned) -> None:
    run_load(planned.server.url, BODIES[:8], concurrency=4)
    planned.server.switch(forget=True)
    (told,) = planned.told()["planner"]
    assert sum(map(sum, told["reliability"]["drafts"])) == 0
    planned.server.switch(policy="c2t")
    assert "planner" not in planned.told()
    refusal = requests.post(f"{planned.server.url}/c2t", json={"forget": True}, timeout=60)
    assert refusal.status_code == 400
    assert "learns nothing while it serves" in refusal.text
    planned.server.switch(policy="auto")


def test_its_series_add_up(planned: Planned) -> None:
    run_load(planned.server.url, BODIES[:8], concurrency=4)
    text = requests.get(f"{planned.server.url}/metrics", timeout=60).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("c2t:"))
    value = lambda name: sum(  # noqa: E731
        float(v) for key, v in lines.items() if key.startswith(f"c2t:{name}_total")
    )
    assert value("plans") > 0
    assert value("planned_layers") >= value("plans")
    assert 0.2 < value("predicted_step_seconds") / value("measured_step_seconds") < 5


# -- trees --------------------------------------------------------------------------------


def test_planned_trees_give_the_same_outputs_at_every_load(
    planned_trees: Planned, expected: list[tuple[int, ...]]
) -> None:
    """The target forwards the planned nodes and nothing else; who wants whole trees gets them."""
    server = planned_trees.server
    bodies = copy.deepcopy(BODIES)
    for body in bodies[::5]:
        body["sampling_params"]["custom_params"] = {"c2t": False}
    for concurrency in (4, len(bodies)):
        server.flush_cache()
        before = server.c2t_state()["attention_verify_rows"]
        result = run_load(server.url, bodies, concurrency=concurrency)
        assert result.outputs == expected
        rows = server.c2t_state()["attention_verify_rows"] - before
        assert rows == verified_rows_reported(result.answers)
    sizes = [
        {rows for rows, count in enumerate(histogram) if count}
        for histogram in (
            answer.meta_info["spec_cap_lens_histogram"] if verified(answer) else []
            for answer in result.answers
        )
    ]
    assert set().union(*sizes[::5]) >= {TREE["num_draft_tokens"]}
    assert len(set().union(*sizes)) >= 8, "trees of one forward differ in size"


@pytest.fixture(scope="module", params=["EAGLE3 chains", "EAGLE3 trees", "STANDALONE trees"])
def any_plans(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    """Two of three steps are uniform, of any number of layers, between planned ones."""
    kind, shape = request.param.split()
    of_shape, policy = (TREE, "AnyTrees") if shape == "trees" else ({}, "AnyJoint")
    flags = (*speculative_flags(kind, **of_shape), "--c2t", "--c2t-policy",
             f"tests.e2e.server_policies:{policy}", "--enable-metrics")  # fmt: skip
    with running(Launch(f"any-plans-{kind}-{shape}", flags), logs) as server:
        yield server


def test_uniform_and_planned_steps_of_any_layers_give_the_same_outputs(
    any_plans: Server, expected: list[tuple[int, ...]]
) -> None:
    for concurrency in (4, len(BODIES)):
        any_plans.flush_cache()
        assert run_load(any_plans.url, BODIES, concurrency=concurrency).outputs == expected
    counted = series(any_plans.url)
    assert min(counted["c2t:plans_totaluniform"], counted["c2t:plans_totalplan"]) > 20


def test_aborted_requests_leave_planned_and_uniform_steps_of_others_untouched(
    any_plans: Server, expected: list[tuple[int, ...]]
) -> None:
    assert differing(run_beside_aborts(any_plans).outputs, expected) == []


def test_planned_and_uniform_steps_give_the_log_probabilities_of_plain_decoding(
    any_plans: Server, plain: Server
) -> None:
    servers = any_plans, plain
    got, wanted = (run_load(server.url, LOGPROB_BODIES, concurrency=8) for server in servers)
    assert_same_logprobs(got, wanted)


def test_planned_and_uniform_steps_keep_to_constraints(any_plans: Server, plain: Server) -> None:
    servers = any_plans, plain
    got, wanted = (run_load(server.url, CONSTRAINED_BODIES, concurrency=12) for server in servers)
    assert differing(got.outputs, wanted.outputs) == []


def test_planned_trees_and_others_take_turns_during_requests(
    planned_trees: Planned, expected: list[tuple[int, ...]]
) -> None:
    posts = [{"policy": name} for name in ("c2t-plus", "auto", "eagle2", "auto")]
    planned_trees.server.flush_cache()
    result, switches = run_beside_posts(planned_trees.server.url, posts, {})
    assert result.outputs == expected
    assert switches > len(posts)
    refusal = requests.post(
        f"{planned_trees.server.url}/c2t", json={"policy": "rows-only"}, timeout=60
    )
    assert refusal.status_code == 400
    assert "rows-only cuts chains only" in refusal.text
    planned_trees.server.switch(policy="auto")


def test_what_a_planner_of_trees_learnt_is_told_and_kept(planned_trees: Planned) -> None:
    run_load(planned_trees.server.url, BODIES, concurrency=4)
    (told,) = planned_trees.told()["planner"]
    assert all(sum(drafts) > 20 for drafts in told["reliability"]["drafts"])
    assert all(told["cost_ms"][name] for name in ("verify", "layer", "rest"))
    assert 0.3 < told["predicted_over_measured"] < 3
    kept = json.loads(planned_trees.state.read_text())
    assert kept["learnt_on"]["topk"] == TREE["topk"]

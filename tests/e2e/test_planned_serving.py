"""A server that plans its steps: same answers; what it learns is reported, kept and forgotten."""

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
    REPOSITORY,
    assert_same_logprobs,
    own_policy_flags,
    replace_text,
    series,
    verified,
    verified_rows_reported,
)
from tests.e2e.mixed_load import FLAGS, RETRACTING, LosslessnessSuite
from tests.e2e.server_policies import FAILS, SHORT, AnyJoint, AnyTrees, BurstsJoint


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
def planned(logs: Path) -> Iterator[Planned]:
    state = logs / "planner.json"
    state.write_text('{"version": 1, "planner": "of a server that died while writing"')
    flags = ("--c2t", "--c2t-state", str(state), "--enable-metrics")
    launch = Launch("planned", (*speculative_flags("EAGLE3"), *flags))
    with running(launch, logs) as server:
        yield Planned(server, state)


def test_outputs_are_those_without_speculation_at_every_load(
    planned: Planned, expected: list[tuple[int, ...]]
) -> None:
    bodies = copy.deepcopy(BODIES)
    for body in bodies[::5]:  # these opt out: their full drafts are verified
        body["sampling_params"]["custom_params"] = {"c2t": False}
    planned.server.flush_cache()
    assert run_load(planned.server.url, bodies, concurrency=len(bodies)).outputs == expected


def test_what_it_learnt_is_told_and_kept(planned: Planned) -> None:
    run_load(planned.server.url, BODIES[:16], concurrency=4)
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


# -- any plan, and trees ----------------------------------------------------------------


@dataclass(frozen=True)
class AnyPlans(Planned):
    """A server whose planner draws plans, or raises where the control file says so."""

    control: Path


@pytest.fixture(scope="module", params=["EAGLE3 chains", "EAGLE3 trees", "STANDALONE trees"])
def any_plans(request: pytest.FixtureRequest, logs: Path) -> Iterator[AnyPlans]:
    """Half of the steps are uniform, of any number of layers or none, between planned ones."""
    kind, shape = request.param.split()
    sizes, policy = (TREE, AnyTrees) if shape == "trees" else ({}, AnyJoint)
    control, state = (logs / f"any-{kind}-{shape}{end}" for end in ("", ".state.json"))
    flags = (
        *speculative_flags(kind, **sizes), *FLAGS, "--enable-metrics", "--c2t-state", str(state),
        *own_policy_flags(policy, control, logs, {"control": str(control)}),
    )  # fmt: skip
    env = {"PYTHONPATH": str(REPOSITORY), **RETRACTING}
    with running(Launch(f"any-plans-{kind}-{shape}", flags, env=env), logs) as server:
        yield AnyPlans(server, state, control)


def test_uniform_and_planned_steps_of_any_layers_give_the_same_outputs(
    any_plans: AnyPlans, suite: LosslessnessSuite
) -> None:
    """Requests join, abort and are retracted; some have seeds."""
    suite.run(any_plans.server)
    counted = series(any_plans.server.url)
    kinds = ("uniform", "plan", "draft_free")
    assert min(counted[f"c2t:plans_total{kind}"] for kind in kinds) > 20


def test_drafts_after_long_bursts_of_draft_free_steps_are_accepted_as_often_as_after_short(
    logs: Path,
) -> None:
    """The draft extends at its end read all tokens of the burst. Requests end within bursts."""
    control = logs / "bursts"
    flags = own_policy_flags(BurstsJoint, control, logs, {"control": str(control)})
    launch = Launch("bursts", (*speculative_flags("STANDALONE"), *flags, *FLAGS))
    results, accepted = [], []
    with running(launch, logs) as server:
        for bursts in ("long", SHORT):
            control.write_text(bursts)
            results.append(run_load(server.url, BODIES, concurrency=6))
    for result in results:
        metas = [answer.meta_info for answer in result.answers if verified(answer)]
        full_drafts = sum(meta["spec_cap_lens_histogram"][-1] for meta in metas)
        tokens = sum(meta["completion_tokens"] - 1 for meta in metas)  # the first is the prefill's
        accepted.append((tokens - sum(meta["spec_verify_ct"] for meta in metas)) / full_drafts)
    assert results[0].outputs == results[1].outputs
    assert accepted[0] == pytest.approx(accepted[1], rel=0.15)


only_eagle3 = pytest.mark.parametrize("any_plans", ["EAGLE3 chains", "EAGLE3 trees"], indirect=True)


@only_eagle3
def test_planned_and_uniform_steps_give_the_log_probabilities_of_plain_decoding(
    any_plans: AnyPlans, plain: Server
) -> None:
    servers = any_plans.server, plain
    got, wanted = (run_load(server.url, LOGPROB_BODIES, concurrency=8) for server in servers)
    assert_same_logprobs(got, wanted)


@only_eagle3
def test_planned_and_uniform_steps_keep_to_constraints(any_plans: AnyPlans, plain: Server) -> None:
    servers = any_plans.server, plain
    got, wanted = (run_load(server.url, CONSTRAINED_BODIES, concurrency=12) for server in servers)
    assert differing(got.outputs, wanted.outputs) == []


@only_eagle3
def test_a_planner_that_raises_leaves_full_drafts_and_every_output_as_it_was(
    any_plans: AnyPlans, expected: list[tuple[int, ...]]
) -> None:
    """The planner raises in about every fourth call that plans, learns or reports."""
    before = series(any_plans.server.url)
    replace_text(any_plans.control, FAILS)
    for _ in range(20):
        requests.get(f"{any_plans.server.url}/c2t", timeout=60).raise_for_status()
    outputs = run_load(any_plans.server.url, BODIES, concurrency=6).outputs
    replace_text(any_plans.control, "any")
    assert differing(outputs, expected) == []
    after = series(any_plans.server.url)
    failed, failures, steps = (
        after[f"c2t:{name}"] - before[f"c2t:{name}"]
        for name in ("plans_totalfailed", "policy_failures_total", "steps_total")
    )
    assert 10 < failed <= failures < steps
    log = any_plans.server.log.read_text()
    (line,) = (line for line in log.splitlines() if "was told to fail" in line)
    assert "the server verifies full drafts there" in line


@pytest.mark.parametrize("any_plans", ["EAGLE3 trees"], indirect=True)
def test_planned_trees_give_the_same_outputs_at_every_load(
    any_plans: AnyPlans, expected: list[tuple[int, ...]]
) -> None:
    """The target forwards the planned nodes and nothing else; opt-outs get full trees.

    What the planner learns is reported and kept.
    """
    server = any_plans.server
    server.switch(policy="auto")
    bodies = copy.deepcopy(BODIES)
    for body in bodies[::5]:
        body["sampling_params"]["custom_params"] = {"c2t": False}
    server.flush_cache()
    before = server.c2t_state()["attention_verify_rows"]
    result = run_load(server.url, bodies, concurrency=len(bodies))
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
    (told,) = any_plans.told()["planner"]
    assert all(sum(drafts) > 20 for drafts in told["reliability"]["drafts"])
    assert all(told["cost_ms"][name] for name in ("verify", "layer", "rest"))
    assert 0.3 < told["predicted_over_measured"] < 3
    kept = json.loads(any_plans.state.read_text())
    assert kept["learnt_on"]["topk"] == TREE["topk"]

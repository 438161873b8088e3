"""Which requests teach a planner, and what a flood of others costs their clients: nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from eval.prompts import demo_mix
from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import greedy, run_load
from tests.e2e.conftest import BODIES

PRICED = ("--c2t", "--c2t-policy", "tests.e2e.server_policies:PricedJoint")

#: What makes a target reject drafts for reasons that no confidence knows.
ATTACKS: list[dict[str, Any]] = [
    {"logit_bias": {"77": 1e4}},
    {"regex": "[0-9]{200}"},
    {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 60}'},
    {"repetition_penalty": 2.0},
    {"frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"temperature": 50.0},
]


pytestmark = pytest.mark.extended


def flood(count: int, tokens: int) -> list[dict[str, Any]]:
    bodies = [greedy(prompt.text, tokens) for prompt in demo_mix(count, seed=11)]
    for number, body in enumerate(bodies):
        body["sampling_params"] |= ATTACKS[number % len(ATTACKS)] | {"ignore_eos": True}
    return bodies


@dataclass(frozen=True)
class Served:
    """Counts of the other clients' answers, and the planner's estimates."""

    gamma: float
    tau: float
    reliability: Any
    constrained: float


def serve(server: Server, *, attacked: bool) -> Served:
    """Clients come, then perhaps a flood, then clients again: these are looked at."""
    run_load(server.url, BODIES[:24], concurrency=1)
    if attacked:
        run_load(server.url, flood(36, 80), concurrency=8)
    told = requests.get(f"{server.url}/c2t", timeout=60).json()["planner"][0]
    server.flush_cache()
    clients = [greedy(prompt.text, 48) for prompt in demo_mix(30, seed=5)]
    metas = [answer.meta_info for answer in run_load(server.url, clients, concurrency=1).answers]
    total = lambda name: sum(meta.get(name, 0) for meta in metas)  # noqa: E731
    steps = total("spec_verify_ct")
    return Served(
        total("spec_num_proposed_drafts") / steps,
        1.0 + total("spec_num_correct_drafts") / steps,
        told["reliability"],
        sum(told.get("constrained", {"drafts": [0]})["drafts"]),
    )


def test_a_flood_of_constrained_requests_changes_no_plan_of_other_clients(logs: Path) -> None:
    """Compare with a server that saw no flood. Costs are fixed, so only drafts change plans."""
    found = {}
    for attacked in (False, True):
        flags = (*speculative_flags("EAGLE3"), *PRICED)
        with running(Launch(f"flooded-{attacked}", flags), logs) as server:
            found[attacked] = serve(server, attacked=attacked)
    quiet, attacked_ = found[False], found[True]
    assert quiet.constrained == 0 < attacked_.constrained
    assert 1.0 < quiet.gamma < 4.8, "else no survival would matter"
    assert attacked_.gamma == pytest.approx(quiet.gamma, rel=0.02)
    assert attacked_.tau == pytest.approx(quiet.tau, rel=0.02)
    seen = [np.sum(of.reliability["drafts"]) for of in (quiet, attacked_)]
    assert seen[1] == pytest.approx(seen[0], rel=0.02), "drafts that were learnt from"

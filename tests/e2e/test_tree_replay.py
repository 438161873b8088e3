"""Replaying recorded trees gives what the live server does, request by request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.prompts import Prompt, demo_mix
from eval.recordings import Recorded, named_bodies, record
from eval.server import Launch, running, speculative_flags
from eval.tables.tree_replay import Forest, replay_trees
from sglang_c2t.config import C2TConfig
from sglang_c2t.offline.client import differing
from sglang_c2t.policies import TreePolicy, build_tree_policy
from sglang_c2t.policies.base import TreeShape
from tests.e2e.conftest import REPOSITORY, GatedServer, own_policy_flags
from tests.e2e.server_policies import SwitchableTree

ALGORITHM = "EAGLE"
#: Far wider than what is served, and short, so that policies find all that they ask for in
#: many requests.
RECORDED = Recorded(num_steps=4, topk=8, max_new_tokens=20)
SERVED = TreeShape(topk=3, num_steps=4, num_draft_tokens=8)
PROMPTS: list[Prompt] = demo_mix(18, seed=3)

CONFIGS: dict[str, dict[str, Any]] = {
    "eagle2": {"policy": "eagle2"},
    "c2t": {"policy": "c2t", "beta": 0.5},
    "c2t, strict": {"policy": "c2t", "beta": 0.8, "policy_options": {"layer_limit": 2}},
    "c2t-eagle2": {"policy": "c2t-eagle2", "beta": 0.5},
    "c2t-log": {"policy": "c2t-log", "beta": 0.3},
    "dyjoint": {"policy": "dyjoint", "beta": 0.08},
    "dymax": {"policy": "dymax", "beta": 0.3},
    "entropy-width": {"policy": "eval.baselines:EntropyWidth"},
    "fork": {"policy": "eval.baselines:Fork", "policy_options": {"width": 2}},
    "static": {
        "policy": "eval.baselines:StaticTree",
        "policy_options": {"paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    },
}

pytestmark = pytest.mark.extended

Counts = tuple[int, int, int]  # verifications, accepted and verified drafts


def policy_of(settings: dict[str, Any]) -> TreePolicy:
    return build_tree_policy(C2TConfig.from_mapping(settings))


@dataclass(frozen=True)
class RecordedAndLive:
    """A recording of PROMPTS and a server with the same draft and a policy to switch."""

    forest: Forest
    gated: GatedServer


@pytest.fixture(scope="module")
def both(logs: Path) -> Iterator[RecordedAndLive]:
    forest = Forest.from_recording(record(ALGORITHM, PROMPTS, logs / "recorded-trees", RECORDED))
    control = logs / "replayed-tree-policy"
    measured = sorted(set().union(*(policy_of(settings).needs for settings in CONFIGS.values())))
    flags = (
        *speculative_flags(ALGORITHM, SERVED.num_steps, SERVED.topk, SERVED.num_draft_tokens),
        *own_policy_flags(
            SwitchableTree, control, logs, {"control": str(control), "measured": measured}
        ),
    )
    launch = Launch("replayed-trees", flags, env={"PYTHONPATH": str(REPOSITORY)})
    with running(launch, logs) as server:
        yield RecordedAndLive(forest, GatedServer(server, ALGORITHM, control))


def served(gated: GatedServer, mode: str) -> dict[str, Counts]:
    """Counts by request; one that ended with its first token has none."""
    result = gated.run(mode, named_bodies(PROMPTS, RECORDED.max_new_tokens))
    infos = [answer.meta_info for answer in result.answers]
    keys = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    return {
        info["id"]: (info[keys[0]], info[keys[1]], info[keys[2]])
        for info in infos
        if keys[0] in info
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_replay_counts_what_the_server_counts_for_each_request(
    both: RecordedAndLive, name: str
) -> None:
    """Wherever the recording holds all that the policy asks for. Fork follows paths however
    unlikely, so it is found in few requests.
    """
    settings = CONFIGS[name]
    live = served(both.gated, json.dumps(settings))
    outcome = replay_trees(policy_of(settings), both.forest, SERVED)
    columns = (outcome.num_steps, outcome.num_correct, outcome.num_proposed)
    replayed = {
        rid: (round(steps), round(correct), round(verified))
        for rid, steps, correct, verified in zip(
            both.forest.requests, *(column.tolist() for column in columns), strict=True
        )
    }
    covered = {
        rid
        for rid, asked in zip(both.forest.requests, outcome.num_uncovered.tolist(), strict=True)
        if asked == 0
    }
    print(f"{name}: {len(covered)} of {len(live)} requests covered, tau "
          f"{outcome.accept_length():.3f}, gamma {outcome.gamma():.3f}")  # fmt: skip
    assert live.keys() == replayed.keys()
    assert {rid: live[rid] for rid in covered} == {rid: replayed[rid] for rid in covered}
    assert len(covered) >= (1 if name == "fork" else len(live) // 4)


def test_recording_every_root_changes_no_output(both: RecordedAndLive) -> None:
    """One root per generated token but the last, so answers are as long as without recording."""
    bodies = named_bodies(PROMPTS, RECORDED.max_new_tokens)
    full = both.gated.run("full", bodies)
    first = both.forest.first_root
    roots = dict(zip(both.forest.requests, (first[1:] - first[:-1]).tolist(), strict=True))
    lengths = {a.meta_info["id"]: len(a.output_ids) - 1 for a in full.answers}
    assert roots == {rid: length for rid, length in lengths.items() if length}
    assert differing(full.outputs, both.gated.run("none", bodies).outputs) == []
    assert differing(full.outputs, both.gated.run("random", bodies).outputs) == []

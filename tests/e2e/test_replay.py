"""Replaying a recording gives what the live server does, and a recording trains a gate for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.baselines import MCSD, logistic, mcsd
from eval.baselines.estimators import save
from eval.metrics import SpecTotals
from eval.prompts import Prompt, demo_mix
from eval.recordings import WITHOUT_PREFIX_CACHE, Recorded, record
from eval.server import Launch, running, speculative_flags
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import C2TConfig
from sglang_c2t.offline.client import LoadResult, differing, greedy
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies import build_policy
from tests.e2e.conftest import REPOSITORY, GatedServer, switchable_flags

RECORDED = Recorded(num_steps=10, max_new_tokens=64)
PROMPTS: list[Prompt] = demo_mix(21, seed=3)
BODIES = [greedy(prompt.text, RECORDED.max_new_tokens) for prompt in PROMPTS]

#: Every policy of the menu and every baseline; "weights" are trained in the test.
CONFIGS: dict[str, dict[str, Any]] = {
    "fixed": {"policy": "fixed", "policy_options": {"length": 3}},
    "dymax": {"policy": "dymax"},
    "dyjoint": {"policy": "dyjoint"},
    "entropy": {"policy": "eval.baselines:Entropy"},
    "c2t": {"policy": "c2t"},
    "c2t-log": {"policy": "c2t-log", "beta": 0.3},
    "c2t-plus": {"policy": "c2t-plus", "beta": 0.3},
    "logistic": {
        "policy": "eval.baselines:Logistic", "policy_options": {"weights": "logistic"}
    },
    "mcsd per request": {
        "policy": "eval.baselines:MCSD",
        "policy_options": {"weights": "mcsd", "per_request": True},
    },
    "mcsd": {"policy": "eval.baselines:MCSD", "policy_options": {"weights": "mcsd"}},
    "mcsd-hidden": {
        "policy": "eval.baselines:MCSDHidden",
        "policy_options": {"weights": "hidden", "per_request": True},
    },
}  # fmt: skip


#: On a STANDALONE draft; EAGLE3 serves all of them.
EVERYWHERE = ("c2t", "c2t-plus", "mcsd")


pytestmark = pytest.mark.extended


@dataclass(frozen=True)
class RecordedAndLive:
    """A recording of PROMPTS and a server with the same draft whose gate can be switched."""

    recording: Recording
    gated: GatedServer
    weights: dict[str, Path]
    full: LoadResult
    """With all drafts verified."""


@pytest.fixture(scope="module", params=["EAGLE3", "STANDALONE"])
def both(request: pytest.FixtureRequest, logs: Path) -> Iterator[RecordedAndLive]:
    algorithm: str = request.param
    hidden = algorithm == "EAGLE3"
    inputs = {"policy": "eval.baselines:MCSDInputs", "policy_options": {"hidden": hidden}}
    what = RECORDED._replace(settings=inputs)
    recording = record(algorithm, PROMPTS, logs / f"recording-{algorithm}", what)
    trained: dict[str, torch.nn.Module] = {
        "logistic": logistic.train(recording), "mcsd": mcsd.train(recording),
        **({"hidden": mcsd.train_hidden(recording)} if hidden else {}),
    }  # fmt: skip
    weights = {name: logs / f"{name}-{algorithm}.safetensors" for name in trained}
    for name, net in trained.items():
        save(net, weights[name])
    control = logs / f"replayed-gate-{algorithm}"
    measured = ["margin", "topk_prob", *(["hidden"] if hidden else [])]
    flags = (
        *speculative_flags(algorithm, RECORDED.num_steps),
        *WITHOUT_PREFIX_CACHE,
        *switchable_flags(control, logs, measured),
    )
    launch = Launch(f"replayed-{algorithm}", flags, env={"PYTHONPATH": str(REPOSITORY)})
    with running(launch, logs) as server:
        gated = GatedServer(server, algorithm, control)
        yield RecordedAndLive(recording, gated, weights, gated.run("full", BODIES))


def test_replay_counts_what_the_server_counts(both: RecordedAndLive) -> None:
    """Verifications, accepted and verified drafts: equal, so tau and gamma are. So are outputs."""
    names = CONFIGS if both.gated.algorithm == "EAGLE3" else EVERYWHERE
    counted = {name: live_and_replayed(both, name) for name in names}
    assert {name: live for name, (live, _) in counted.items()} == {
        name: replayed for name, (_, replayed) in counted.items()
    }


def live_and_replayed(both: RecordedAndLive, name: str) -> tuple[SpecTotals, SpecTotals]:
    """Counts of one policy in the server, and in the replay of the recording.

    A batch-wide stop depends on who shares the batch, so that one is served one by one.
    """
    settings = dict(CONFIGS[name])
    options = settings.get("policy_options", {})
    if "weights" in options:
        path = str(both.weights[options["weights"]])
        settings["policy_options"] = {**options, "weights": path}
    chains = Chains.from_recording(both.recording)
    policy = build_policy(C2TConfig.from_mapping(settings))
    if isinstance(policy, MCSD):
        settings["beta"] = beta_away_from_all(policy, chains)
        policy = build_policy(C2TConfig.from_mapping(settings))
    concurrency = 1 if name == "mcsd" else 8
    result = both.gated.run(json.dumps(settings), BODIES, concurrency)
    assert differing(result.outputs, both.full.outputs) == [], name
    live = SpecTotals.from_meta_infos(answer.meta_info for answer in result.answers)

    outcome = replay(policy, chains)
    replayed = SpecTotals(
        verify_ct=round(float(outcome.num_steps.sum())),
        num_correct_drafts=round(float(outcome.num_correct.sum())),
        num_proposed_drafts=round(float(outcome.num_proposed.sum())),
    )
    return live, replayed


def beta_away_from_all(policy: MCSD, chains: Chains) -> float:
    """A threshold near the gate's own that no draft's confidence is near.

    Hidden states and probabilities of the vocabulary are recorded in half precision, so that a
    confidence beside the threshold may be above it in the server and below it in the replay.
    """
    net: Any = policy.weights
    model: Any = SimpleNamespace(
        needs=policy.needs, confidence=lambda layer: net(policy.inputs(layer)).sigmoid()
    )
    # A chain ends at its first low one, so that no later one decides.
    deciding = chains.confidences(model).cummin(dim=1).values
    near = deciding[(deciding - policy.beta).abs() < 0.05].double().sort().values
    gap, at = near.diff().max(dim=0)
    assert gap > 1e-4, "confidences are too dense to stand between them"
    return float(near[at] + gap / 2)


def test_recording_every_root_changes_no_output(both: RecordedAndLive) -> None:
    """One root per generated token but the last, so answers are as long as without recording."""
    chains = Chains.from_recording(both.recording)
    roots = (chains.first_root[1:] - chains.first_root[:-1]).tolist()
    lengths = dict(zip(chains.requests, roots, strict=True))
    numbers: dict[str, int] = {}
    for prompt, answer in zip(PROMPTS, both.full.outputs, strict=True):
        number = numbers.setdefault(prompt.family, 0)
        numbers[prompt.family] += 1
        assert lengths[f"{prompt.family}/{number}"] == len(answer) - 1
    assert differing(both.full.outputs, both.gated.run("none", BODIES).outputs) == []

"""The simulator is held to what was published, and its rules to each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval import simulate
from eval.gpu.models import SHAPES
from eval.simulate import (
    MACHINES,
    POSITIONS,
    Costs,
    Drafts,
    MeasuredCosts,
    RecordedDrafts,
    Simulation,
    gate_of,
    main,
)
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.plan.cost import StepCost
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.survival import OneSlope, Survival
from sglang_c2t.policies.fixed import Fixed
from tests.recordings import random_chains, recording


@pytest.mark.parametrize("spread", [0.1, 2.0, 4.0])
def test_drafts_are_accepted_as_often_by_position_as_published(spread: float) -> None:
    drafts = Drafts(POSITIONS, spread=spread)
    confidence, survival = drafts.draw(np.random.default_rng(0), 60_000)
    assert survival.mean(axis=0) == pytest.approx(POSITIONS, abs=0.01)
    assert (np.diff(confidence, axis=1) <= 0).all()


def test_a_classifier_that_sees_everything_knows_the_survival() -> None:
    confidence, survival = Drafts(POSITIONS, blindness=0.0).draw(np.random.default_rng(0), 50)
    assert confidence == pytest.approx(survival)


@pytest.mark.parametrize("positions", [[], [1.0], [0.5, 0.6], [0.5, 0.0]])
def test_acceptance_that_does_not_fall_is_refused(positions: list[float]) -> None:
    with pytest.raises(ConfigError, match="must fall from below 1"):
        Drafts(positions)


@pytest.mark.parametrize("batch", [4, 256])
def test_planned_is_no_slower_than_any_fixed_length_and_no_faster_than_who_knows_all(
    batch: int,
) -> None:
    made = Simulation(Drafts(POSITIONS[:4]), Costs(SHAPES["8b"], MACHINES["h100"]), batch)
    auto = made.planned(Planner(4, Survival(4)), 150)
    fixed = max(made.fixed(layers, 150) for layers in range(1, 5))
    assert 0.98 * max(fixed, made.none()) <= auto <= 1.02 * made.bound(150)


def kneed(knee: float) -> MeasuredCosts:
    """A drafter that makes all layers in one forward, beside a target that is bound by memory up
    to about ``knee`` rows.
    """
    curves = StepCost()
    for rows in range(1, 2100, 16):
        curves.verify.observe(rows, (1.0 + (rows / knee) ** 2) ** 0.5)
    curves.layer.observe(1, 1e-9)
    curves.rest.observe(1, 0.1)
    return MeasuredCosts(curves)


def test_rows_only_overtakes_a_fixed_length_where_vllm_measured_it() -> None:
    """vllm-project/vllm#52362, against fixed 7: 7.0, 8.3, 4.7 and 5.4 % slower at 4 to 32 at once,
    which is overhead and not in the simulation, 6.4 % faster at 64 and 69.7 % at 256. Where the
    knee gives the last, seven percent of overhead are made good between 32 and 64.
    """
    drafts, costs = Drafts(POSITIONS), kneed(370.0)
    gains = {}
    for batch in (4, 32, 64, 256):
        made = Simulation(drafts, costs, batch)
        planner = Planner(7, OneSlope(7), all_layers=True)
        gains[batch] = made.planned(planner, 40, learning=210) / made.fixed(7, 40)
    assert gains[256] == pytest.approx(1.70, abs=0.12)
    assert gains[4] < 1.02
    assert gains[32] < 1.07 < gains[64]


def test_the_command_prints_a_table_that_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = Planner(2, Survival(2))
    Simulation(Drafts([0.6, 0.3]), kneed(100.0), 4).planned(planner, 5, learning=5)
    control, info = tmp_path / "c2t.json", tmp_path / "server_info.json"
    control.write_text(json.dumps({"planner": [planner.report()]}))
    info.write_text(json.dumps({"planner": planner.report()}))
    few = ["--batch", "2", "--steps", "4", "--positions", "0.6", "0.3"]
    for source in (["--machine", "b200"], ["--curves", str(control)], ["--curves", str(info)]):
        assert main([*few, *source]) == 0
        out = capsys.readouterr().out
        assert out.startswith("SIMULATED on")
        assert "| batch | tokens/s without | fixed 1 | fixed 2 | rows only | auto | bound |" in out
        assert len([line for line in out.splitlines() if line.startswith("| 2 |")]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0"], "--batch and --steps must be 1 or more"),
        (["--positions", "0.5", "0.7"], "must fall"),
        (["--curves", "absent.json"], "holds no cost curves"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_curves_of_a_planner_that_measured_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c2t.json"
    path.write_text(json.dumps(Planner(2, Survival(2)).report()))
    with pytest.raises(ConfigError, match="had measured nothing yet"):
        simulate._curves(path)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_recorded_drafts_walked_in_order_give_what_replay_gives(drafts: int) -> None:
    chains = Chains.from_recording(recording(random_chains(20, 30, 3), roots="every"))
    recorded, rng = RecordedDrafts(chains, gate_of("auto"), 3), np.random.default_rng(0)
    expected = replay(Fixed(), chains, max_length=drafts)
    correct = 0
    for _ in range(int(expected.num_steps.sum())):
        _, survived = recorded.draw(rng, 1)
        taken = min(int(survived.sum()), drafts)
        correct += taken
        recorded.accepted(np.array([taken]))
    assert correct == expected.num_correct.sum()
    assert recorded._at.tolist() == [0], "all are answered, the first comes again"


def test_recorded_request_joins_where_one_ends_or_the_batch_grows() -> None:
    chains = Chains.from_recording(recording(random_chains(20, 30, 3), roots="every"))
    recorded, rng = RecordedDrafts(chains, gate_of("auto"), 3), np.random.default_rng(0)
    starts = chains.first_root.tolist()
    confidence, _ = recorded.draw(rng, 2)
    assert confidence.shape == (2, 3)
    recorded.accepted(np.array([starts[1] - 1, 3]))  # all of the first; four of the second
    assert recorded._at.tolist() == [starts[2], starts[1] + 4]
    recorded.draw(rng, 3)
    assert recorded._at.tolist() == [starts[2], starts[1] + 4, starts[3]]
    recorded.draw(rng, 1)
    assert recorded._at.tolist() == [starts[2]]

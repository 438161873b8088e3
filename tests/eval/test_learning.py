"""What planners learn from recorded traffic, on made-up recordings."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from eval import learning
from eval.learning import WINDOW, Traffic, calibration, main, tokens_until, warm_up
from eval.simulate import MeasuredCosts, RecordedDrafts, gate_of
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.plan.cost import StepCost
from sglang_c2t.policies.fixed import Fixed
from tests.recordings import random_chains, recording, write

DEPTH = 3


def costs() -> MeasuredCosts:
    curves = StepCost()
    for rows in (1, 100):
        curves.verify.observe(rows, 30.0 + rows)
    curves.layer.observe(1, 4.0)
    curves.rest.observe(1, 5.0)
    return MeasuredCosts(curves)


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    made = recording(random_chains(40, 60, DEPTH), roots="every")
    return Traffic(Chains.from_recording(made), DEPTH, costs())


@pytest.mark.parametrize("drafts", [0, 1, DEPTH])
def test_requests_are_walked_through_as_replay_walks_through_them(
    traffic: Traffic, drafts: int
) -> None:
    chains, rng = traffic.chains, np.random.default_rng(0)
    steps = correct = 0
    for request, start in enumerate(chains.first_root[:-1].tolist()):
        recorded = RecordedDrafts(chains, gate_of("auto"), DEPTH, [request])
        for first in itertools.chain([True], itertools.repeat(False)):
            _, survived = recorded.draw(rng, 1)
            if recorded._at[0] == start and not first:
                break
            taken = min(int(survived.sum()), drafts)
            steps, correct = steps + 1, correct + taken
            recorded.accepted(np.array([taken]))
    expected = replay(Fixed(), chains, max_length=drafts)
    assert (steps, correct) == (expected.num_steps.sum(), expected.num_correct.sum())


def test_another_request_joins_where_one_is_answered_or_the_batch_grows(traffic: Traffic) -> None:
    recorded, rng = RecordedDrafts(traffic.chains, gate_of("auto"), DEPTH), np.random.default_rng(0)
    starts = traffic.chains.first_root.tolist()
    confidence, _ = recorded.draw(rng, 2)
    assert confidence.shape == (2, DEPTH)
    recorded.accepted(np.array([starts[1] - 1, 3]))  # all of the first; four of the second
    assert recorded._at.tolist() == [starts[2], starts[1] + 4]
    recorded.draw(rng, 3)
    assert recorded._at.tolist() == [starts[2], starts[1] + 4, starts[3]]
    recorded.draw(rng, 1)
    assert recorded._at.tolist() == [starts[2]]


def test_a_draft_that_survives_with_its_joint_probability_is_told_to(traffic: Traffic) -> None:
    """That is how the recording was made, and the classifier reads that probability."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "LEARNT_DRAFTS", 2000)
        found = calibration(traffic, "auto", 4, 6000)
    assert max(found.error) < 0.05
    assert min(found.auc) > 0.6
    assert found.verified[0] >= found.verified[-1] > 0


@pytest.mark.parametrize(
    ("rates", "tokens"),
    [
        ([1.0, 1.0, 1.0], 0),
        ([0.5, 0.9, 1.0, 1.0], 2 * WINDOW),
        ([0.5, 1.0, 0.97, 1.03], WINDOW),  # a window may be unlucky where the rest is not
    ],
)
def test_warm_up_ends_where_what_is_left_is_within_two_percent(
    rates: list[float], tokens: int
) -> None:
    assert tokens_until(np.array(rates), np.ones(len(rates))) == tokens


def test_a_planner_that_has_served_the_traffic_needs_no_warm_up(traffic: Traffic) -> None:
    def before(planner) -> None:
        learning.serve(traffic.simulation("auto", 2), planner, 20 * WINDOW)

    assert warm_up(traffic, before, 2, "") == 0


def test_the_command_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "recording"
    write(folder, random_chains(4, 30, DEPTH), roots="every")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "LEARNT_DRAFTS", 100)
        patch.setattr(learning, "WINDOW", 20)
        few = ["--layers", "2", "--batch", "1", "2", "--drafts", "200"]
        assert main([str(folder), *few]) == 0
    out = capsys.readouterr().out
    assert "| 1 | auto | AUC, all |" in out
    assert "| cold, 2 at once |" in out


@pytest.mark.parametrize("layers", [0, 9])
def test_layers_that_were_not_recorded_are_refused(
    tmp_path: Path, layers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recording"
    write(folder, random_chains(1, 2, DEPTH), roots="every")
    assert main([str(folder), "--layers", str(layers)]) == 2
    assert "--layers must lie in 1..3, as recorded" in capsys.readouterr().err

"""A planner's estimates are kept, and an unusable file costs only the cold start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_c2t import files
from sglang_c2t.config import ConfigError
from sglang_c2t.plan.cost import StepCost
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import StepKind, StepPlan, StepRecord
from sglang_c2t.plan.survival import Survival
from sglang_c2t.srt.draft.state_file import EVERY_IF_ASKED, StateFile

MODELS = {"target": "a", "draft": "b", "num_steps": 3, "policy": "auto"}
CHAINS = np.array([[0.9, 0.5, 0.2]])


def learn(planner: Planner, accepted: int) -> None:
    plan = StepPlan(StepKind.PLANNED, 3, 1, 4)
    planner.learn(StepRecord(plan, 1, outcome=(CHAINS, np.array([3]), np.array([accepted]))))


def taught() -> Planner:
    planner = Planner(3, Survival(3))
    for _ in range(50):
        learn(planner, 1)
    return planner


def survival(planner: Planner) -> list[float]:
    values: list[float] = planner.survival.of_chains(CHAINS)[0].tolist()
    return values


COLD = survival(Planner(3, Survival(3)))


def test_state_file_restores_the_planner(tmp_path: Path) -> None:
    path, first, second = tmp_path / "state.json", taught(), Planner(3, Survival(3))
    StateFile(path, first, MODELS).save()
    StateFile(path, second, MODELS)
    assert survival(second) == pytest.approx(survival(first))
    assert survival(second) != pytest.approx(COLD)


def test_state_file_of_another_replica_is_read_only(tmp_path: Path) -> None:
    """Two replicas share a file."""
    path, first, second = tmp_path / "state.json", taught(), Planner(3, Survival(3))
    StateFile(path, first, MODELS).save()
    before = path.read_bytes()
    kept = StateFile(path, second, MODELS, writes=False)
    assert survival(second) == pytest.approx(survival(first))
    learn(second, 3)
    kept.save()
    assert path.read_bytes() == before
    StateFile(tmp_path / "absent.json", second, MODELS, writes=False)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def content(**changes: Any) -> str:
    planner = taught().state()
    return json.dumps({"version": 2, "learnt_on": MODELS, "planner": planner} | changes)


BAD_COUNTS = {"survival": {"counts": [[[1, -1]]]}, "cost": {"verify": {}, "layer": {}, "rest": {}}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ('{"version": 1', "Expecting"),
        ("[]", "no state of version 2"),
        (content(version=1), "no state of version 2"),
        (content(learnt_on={**MODELS, "draft": "c"}), "learnt on"),
        (content(planner=[]), "its planner is no object"),
        (content(planner={}), "survival"),
        (content(planner=BAD_COUNTS), "shape"),
        (content(planner=taught().state() | {"cost": {"verify": {"x": 1}}}), "invalid literal"),
        ("\ud83d" + "x", ""),
        (" " * (files.LARGEST_JSON + 1), "at most"),
    ],
)
def test_state_file_that_is_invalid_starts_cold_in_one_line(
    text: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, planner = tmp_path / "state.json", Planner(3, Survival(3))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with caplog.at_level(logging.WARNING):
        StateFile(path, planner, MODELS)
    (line,) = caplog.messages
    assert "starts cold" in line
    assert said in line
    assert "\n" not in line
    assert survival(planner) == COLD
    curves = [*StepCost().curves, "context", "request"]
    assert planner.cost.state() == {name: {} for name in curves}
    assert json.loads(path.read_text())["version"] == 2, "ours is in its place"


def test_state_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent is no directory, for the file state"):
        StateFile(tmp_path / "absent" / "state", taught(), MODELS)
    (tmp_path / "state").mkdir()
    with pytest.raises(ConfigError, match="state cannot be written"):
        StateFile(tmp_path / "state", taught(), MODELS)


def test_state_file_write_failure_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    folder.mkdir()
    kept = StateFile(folder / "state.json", taught(), MODELS)
    (folder / "state.json").unlink()
    folder.rmdir()
    for _ in range(3):
        kept.save()
    assert len([line for line in caplog.messages if "cannot write" in line]) == 1


def test_state_file_is_written_at_most_once_in_an_interval(tmp_path: Path) -> None:
    path, planner = tmp_path / "state.json", Planner(3, Survival(3))
    kept = StateFile(path, planner, MODELS)
    before = path.read_text()
    learn(planner, 1)
    kept.save_now_and_then()
    kept.save_now_and_then(EVERY_IF_ASKED)
    assert path.read_text() == before
    kept.save_now_and_then(0.0)
    assert path.read_text() != before

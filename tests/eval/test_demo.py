"""The demo's table and its verdict, of made-up records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval import demo
from eval.bench.config import read_config
from eval.bench.records import Cell
from eval.smollm2.prompts import PackageError
from eval.smollm2.target import TargetError
from tests.eval.bench_runs import BASELINE, Edit, made_methods, write_made_run

METHODS = (made_methods()[0], made_methods()[2], made_methods()[-1])
COST_MS = {"verify": {"4": 50.0, "16": 80.0}, "layer": {"4": 3.0, "16": 4.0}, "rest": {"4": 5.0}}


@pytest.fixture(autouse=True)
def real_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were there: nothing of it is served here."""
    monkeypatch.setattr(demo, "target_folder", lambda: None)
    monkeypatch.setattr(demo, "humaneval", list)


def planned(cell: Cell) -> Cell:
    """Fixed speeds, and a planner that learnt while the last method was served."""
    speed = {BASELINE: 40.0, "fixed 3": 60.0, "c2t-plus": 70.0}[cell.method]
    planner = {"cost_ms": COST_MS} if cell.method == "c2t-plus" else None
    return replace(cell, tokens_per_second=speed, planner=planner)


def other(cell: Cell) -> Cell:
    """The same with another token in one answer."""
    if cell.method != "fixed 3" or cell.concurrency != 16:
        return planned(cell)
    first, *rest = cell.requests
    return replace(planned(cell), requests=(replace(first, output_ids=(-1,)), *rest))


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, edit: Edit,
    code: int,
) -> str:  # fmt: skip
    """Return what the demo prints after a run that ended with ``code``."""

    def run(argv: list[str]) -> int:
        assert not folder.exists(), "what an earlier demo measured is gone"
        write_made_run(folder, methods=METHODS, loads=((0.0, (4, 16)),), repeats=1, edit=edit)
        told = json.loads((folder / "run.json").read_text())
        told["provenance"]["versions"]["sglang-c2t"] = "0.1"
        told["config"]["model"] = {"target": "smollm2", "algorithm": "EAGLE3"}
        (folder / "run.json").write_text(json.dumps(told))
        return code

    folder.mkdir()
    monkeypatch.setattr(demo, "FOLDER", folder)
    monkeypatch.setattr(demo.run, "main", run)
    assert demo.main([]) == code
    return capsys.readouterr().out


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    """Lines of the table by concurrency and method."""
    lines = [line.strip().split("  ") for line in text.splitlines()]
    parts = [[part.strip() for part in line if part.strip()] for line in lines]
    return {(p[0], p[1]): p[2:] for p in parts if len(p) == 9}


def test_the_table_has_speeds_ratios_and_work_and_says_what_a_draft_layer_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = shown(monkeypatch, capsys, tmp_path / "run", planned, 0)
    told = rows(text)
    assert list(told)[1:] == [
        (c, method.method.name) for c in ("4", "16") for method in METHODS
    ]  # behind the head
    assert told["4", BASELINE][:4] == ["40", "1.00", "-", "-"]
    assert told["16", "c2t-plus"][:2] == ["70", "1.75"]
    assert all(row[-1] == "yes" for row in list(told.values())[1:])
    plain = " ".join(text.split())
    assert "target SmolLM2-135M-Instruct, its EAGLE3 draft of ours" in plain
    assert "4 at once 6% (3.0 of 50.0 ms), 16 at once 5% (4.0 of 80.0 ms)" in plain
    assert plain.endswith("all 48 compared are identical to those without speculation.")


def test_outputs_that_differ_are_told_in_their_row_and_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = shown(monkeypatch, capsys, tmp_path / "run", other, 1)
    assert [key for key, row in rows(text).items() if row[-1] == "NO"] == [("16", "fixed 3")]
    assert "1 of 48 compared DIFFER" in text


def test_what_nothing_was_compared_with_is_not_called_identical(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def edit(cell: Cell) -> Cell | None:
        lost = cell.method == BASELINE and cell.concurrency == 16
        return None if lost else planned(cell)

    told = rows(shown(monkeypatch, capsys, tmp_path / "run", edit, 1))
    assert told["16", "fixed 3"][1] == told["16", "fixed 3"][-1] == "-"


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_run_without_any_answer_ends_with_its_own_code_and_no_table(
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(demo.run, "main", lambda argv: code)
    assert demo.main([]) == code
    assert capsys.readouterr().out == ""


def test_an_interrupted_run_shows_no_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert shown(monkeypatch, capsys, tmp_path / "run", planned, 130) == ""


def refuse(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("needed", "error"),
    [("target_folder", TargetError("no target")), ("humaneval", PackageError("no problems"))],
)
def test_without_the_real_pair_the_tiny_one_is_served_and_a_line_says_why(
    needed: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(demo.run, "main", lambda argv: asked.append(argv) or 2)
    assert demo.main([]) == 2
    monkeypatch.setattr(demo, needed, lambda: refuse(error))
    assert demo.main([]) == 2
    assert [argv[0] for argv in asked] == [demo.REAL[0], demo.TINY[0]]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f"as the real pair cannot be had: {error}")


@pytest.mark.parametrize("chosen", [demo.REAL, demo.TINY])
def test_either_pair_is_compared_with_none_by_greedy_outputs_in_float32(
    chosen: tuple[str, ...],
) -> None:
    """Two fixed lengths and the planner beside it; float32 is what the CPU's flags ask for."""
    config = read_config(Path(chosen[0]))
    names = [method.name for method in config.methods]
    only = [name for name in names if name in chosen] or names
    assert [only[0], only[-1], len(only)] == ["no speculation", "auto", 4]
    assert config.requests.equal_outputs in ("greedy", "seeded")
    assert "--dtype" not in config.server.flags

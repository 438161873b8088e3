"""Runs on models of a shape, and runs within a time, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.bench.config import BenchConfig, as_dict, changed, read_config
from eval.bench.methods import launches, passes, plan, record_of
from eval.bench.records import Cell, Request, Run, read_run, write_cell, write_run
from eval.bench.runner import Budget, OutOfTime, Runner
from eval.gpu import graft
from eval.report import __main__ as report
from eval.run import main
from eval.server import TARGET
from sglang_c2t.config import ConfigError

CONFIGS = Path(__file__).parents[2] / "eval" / "configs"
SHAPES = CONFIGS / "gpu-shape.toml"


@pytest.fixture
def config() -> BenchConfig:
    return read_config(SHAPES)


# -- servers ------------------------------------------------------------------------------


def test_servers_of_a_shape_load_the_graft_and_ours_where_it_serves_or_is_off(
    config: BenchConfig, tmp_path: Path
) -> None:
    servers = launches(config, tmp_path)
    assert list(servers) == [method.name for method in config.methods]
    kept = [record_of(config, method, tmp_path) for method in config.methods]
    assert [method.name for method in kept if method.baseline] == ["no speculation"]
    for method in config.methods:
        launch = servers[method.name]
        argv = launch.argv(1)
        assert ("--c2t" in argv) == method.gated
        batches = [str(n) for n in config.load[0].concurrency]
        at = argv.index("--cuda-graph-bs-decode")
        assert argv[at + 1 : at + 1 + len(batches)] == batches
        loaded = launch.env["SGLANG_PLUGINS"].split(",")
        ours = method.plugin_off or method.gated
        assert loaded == ["c2t"] * ours + ["step_clock", "graft"]
        assert json.loads(launch.env[graft.ENV])["target"] == str(TARGET)


def test_large_models_start_once_in_the_order_of_the_configuration(
    config: BenchConfig, tmp_path: Path
) -> None:
    cells = plan(config, ["no speculation", "auto", "c2t", "c2t-plus"], at_once=[8])
    assert {cell.key.concurrency for cell in cells} == {8}
    turns = passes(config, cells, list(launches(config, tmp_path)))
    assert [name for (name,), _ in turns] == ["no speculation", "auto", "c2t-plus", "c2t"]
    assert [len(mine) for _, mine in turns] == [3, 3, 3, 3]


def test_call_out_of_time_ends_with_3_and_keeps_its_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(SHAPES), "--out", str(tmp_path), "--budget-s", "1", "--revision", "abc"]
    assert main(argv) == main(argv) == 3
    assert "the same command goes on where this one stopped" in capsys.readouterr().out
    assert read_run(tmp_path).provenance["revision"] == "abc", "where there is no git"


def test_unknown_shape_is_refused_with_those_there_are(config: BenchConfig) -> None:
    with pytest.raises(ConfigError, match="no target demo:9b; sizes are 8b, 1b, small"):
        changed(config, model={**as_dict(config)["model"], "target": "demo:9b"})


# -- budget -------------------------------------------------------------------------------


def test_budget_goes_by_what_parts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("eval.bench.runner.time.monotonic", lambda: now)
    budget = Budget(100.0)
    with budget.part("cell", 20.0):
        now = 60.0
    with budget.part("other", 20.0):
        pass
    for name, guess in (("cell", 20.0), ("server", 35.0)):  # a fifth is kept in reserve
        with pytest.raises(OutOfTime), budget.part(name, guess):
            raise AssertionError("it began")


def test_run_out_of_time_starts_no_server(
    config: BenchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.bench.runner.running", lambda *_: pytest.fail("a server started"))
    servers, console = launches(config, tmp_path), Console(quiet=True)
    runner = Runner(config, tmp_path, [], "", servers, console, Budget(1.0))
    with pytest.raises(OutOfTime):
        runner.run(plan(config))
    assert runner.failures == []


# -- the report ---------------------------------------------------------------------------


def made_cell(name: str, kind: str, batch: int) -> Cell:
    """Four requests of 16 tokens of prompt and 96 of answer."""
    meta = {} if kind == "none" else {"spec_verify_ct": 48, "spec_num_correct_drafts": 47,
                                      "spec_num_proposed_drafts": 144}  # fmt: skip
    requests = tuple(
        Request(i, "math", 16, 96, (1,), 0.0, 1.0, 1.0, True, "", meta) for i in range(4)
    )
    rate = {"no speculation": 100.0, "fixed 3": 200.0}.get(name, 150.0)
    clock: dict[str, Any] = {"seconds": 1.0, "tokens": rate, "steps": 10, "rows": 40 * batch}
    return Cell(
        name, 0.0, batch, 0, "2026-01-01T00:00:00+00:00", 2.0, 4 * 96, rate, {}, {}, {}, [],
        requests, clock,
    )  # fmt: skip


def test_report_of_a_shape_says_what_is_random_and_shows_steps(
    config: BenchConfig, tmp_path: Path
) -> None:
    kinds = {method.name: method.kind for method in config.methods}
    small = replace(config, repeats=1)
    methods = tuple(record_of(small, method, tmp_path) for method in small.methods)
    facts = {"n": 4, "sha256": "", "parts": [{"family": "math", "n": 4, "source": "demo:math"}]}
    write_run(tmp_path, Run("2026-01-01", as_dict(small), {"revision": "1"}, facts, methods))
    for cell in plan(small, at_once=[1, 8]):
        name = cell.key.method
        write_cell(tmp_path, made_cell(name, kinds[name], cell.key.concurrency))
    assert report.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    head = text.split("## How to read it")[0]
    assert "those of the small pair demo, written into models of the shape 8b" in head
    assert "random otherwise" in head
    (row,) = (line for line in text.splitlines() if line.startswith("| 8, fixed 3 "))
    assert [cell.strip() for cell in row.split("|")][-3:-1] == ["100.00", "32.0"]

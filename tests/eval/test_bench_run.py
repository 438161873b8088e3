"""``python -m eval.run``: going on, refusing, judging; without servers but for the last test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval import run as module
from eval import server
from eval.bench import runner as runner_module
from eval.bench.datasets import Dataset, Sample
from eval.bench.methods import PlannedCell, launches, plan
from eval.bench.records import (
    Cell,
    RecordError,
    Request,
    has_cell,
    read_cells,
    read_run,
    write_cell,
)
from eval.bench.runner import CellError, Runner
from eval.run import CHECKS_FILE, judge, main, open_run
from sglang_c2t.offline.servers import ServerError
from tests.eval.bench_configs import config

SAMPLES = [Sample("math", f"prompt {i}", 2) for i in range(8)]
DATASET = Dataset(SAMPLES, {"name": "made up", "n": 8, "sha256": "00", "parts": []})

TOML = """
name = "tiny"
repeats = 1
[server]
device = "cpu"
mode = "together"
starting = 2
[requests]
max_new_tokens = 24
warm_up = 2
cached_prompts = true
[[load]]
temperature = 0.0
concurrency = [1, 4]
prompts = [2, 8]
[dataset]
[[dataset.parts]]
source = "demo:math"
n = 4
[[dataset.parts]]
source = "demo:chat"
n = 4
[[methods]]
kind = "none"
[[methods]]
kind = "c2t"
policy = "c2t"
[[methods]]
kind = "c2t"
policy = "dyjoint"
"""


def made(cell: PlannedCell, token: int = 1) -> Cell:
    """A cell as if measured: its outputs depend on ``token`` only, nothing was drafted."""
    requests = tuple(
        Request(i, "math", 2, 2, (i, token), 0.0, 1.0, 0.5, True) for i in range(cell.prompts)
    )
    key = cell.key
    return Cell(
        key.method, key.temperature, key.concurrency, key.repeat, "", 1.0, 2 * len(requests),
        2.0 * len(requests), {}, {}, {}, [], requests,
    )  # fmt: skip


class Fleet:
    """Servers that start at once; those in ``broken`` do not, those in ``dead`` are gone."""

    def __init__(self, broken: str = "", dead: str = "") -> None:
        self.broken, self.dead = broken, dead
        self.running: list[str] = []
        self.started: list[str] = []
        self.most = 0

    def __call__(self, launch: Any, log_dir: Path, unwanted: threading.Event) -> FakeServer:
        return FakeServer(self, launch.name)


class FakeServer:
    """A context manager that gives itself, with what the runner looks at."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.process = self
        self.url = "http://nowhere"

    def poll(self) -> int | None:
        return 1 if self.name == self.fleet.dead else None

    def __enter__(self) -> FakeServer:
        if self.name == self.fleet.broken:
            raise ServerError("out of memory\nlast words")
        self.fleet.started.append(self.name)
        self.fleet.running.append(self.name)
        self.fleet.most = max(self.fleet.most, len(self.fleet.running))
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.running.remove(self.name)


class MadeRunner(Runner):
    """Measures nothing; cells whose method is in ``failing`` fail."""

    failing = ""
    measured: list[PlannedCell]

    def measure(self, cell: PlannedCell, *_: Any, **__: Any) -> Cell:
        if cell.key.method == self.failing:
            raise CellError("2 of 8 requests failed")
        self.measured.append(cell)
        return made(cell)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet()
    monkeypatch.setattr(runner_module, "running", fleet)
    return fleet


def make_runner(folder: Path, **changes: Any) -> tuple[MadeRunner, list[PlannedCell]]:
    settings = config(**changes)
    runner = MadeRunner(
        settings, folder, SAMPLES, "", launches(settings, folder), Console(quiet=True)
    )
    runner.measured = []
    return runner, plan(settings)


@pytest.mark.parametrize("mode", ["together", "in-turn"])
def test_every_cell_is_measured_once_and_all_servers_are_stopped(
    tmp_path: Path, fleet: Fleet, mode: str
) -> None:
    runner, cells = make_runner(tmp_path, server__mode=mode)
    runner.run(cells)
    assert sorted(c.key for c in runner.measured) == sorted(c.key for c in cells)
    assert all(has_cell(tmp_path, c.key) for c in cells)
    assert runner.failures == []
    assert fleet.running == []
    assert len(fleet.started) == len(runner.servers) * 2, "anew for each repeat"


@pytest.mark.parametrize(("free_gib", "most"), [(16.6, 6), (16.4, 1)])
def test_servers_run_at_once_only_if_they_fit_into_memory(
    tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, free_gib: float, most: int
) -> None:
    """Six servers of 2.5 GiB, and 1.5 to spare."""
    memory = types.SimpleNamespace(available=free_gib * 2**30)
    monkeypatch.setattr(runner_module.psutil, "virtual_memory", lambda: memory)
    runner, cells = make_runner(tmp_path, server__mode="auto", server__memory_gib=2.5)
    runner.run(cells)
    assert len(runner.measured) == len(cells)
    assert fleet.most == most


def test_cells_that_are_there_are_not_measured_again(tmp_path: Path, fleet: Fleet) -> None:
    runner, cells = make_runner(tmp_path)
    runner.run(cells)
    lost = [c for c in cells if c.key.method == "c2t" and c.key.repeat == 1]
    for cell in lost:
        (tmp_path / "cells" / cell.key.file_name).unlink()
    fleet.started.clear()
    again, _ = make_runner(tmp_path)
    again.run(cells)
    assert again.measured == lost
    assert fleet.started == ["c2t"], "servers that nothing is left for stay down"
    third, _ = make_runner(tmp_path)
    third.run(cells)
    assert (third.measured, fleet.started) == ([], ["c2t"])


def test_failing_method_is_reported_and_the_others_go_on(tmp_path: Path, fleet: Fleet) -> None:
    runner, cells = make_runner(tmp_path)
    runner.failing = "fixed 3"
    runner.run(cells)
    mine = [c for c in cells if c.key.method == "fixed 3"]
    assert [str(c.key) for c in mine] == [f.split(":")[0] for f in runner.failures]
    assert "2 of 8 requests failed" in runner.failures[0]
    assert len(runner.measured) == len(cells) - len(mine)
    assert not any(has_cell(tmp_path, c.key) for c in mine), "the next call tries them again"


@pytest.mark.parametrize("how", ["broken", "dead"])
def test_server_that_is_not_there_costs_its_own_cells_only(
    tmp_path: Path, fleet: Fleet, how: str
) -> None:
    setattr(fleet, how, "c2t")
    runner, cells = make_runner(tmp_path)
    runner.run(cells)
    lost = [c for c in cells if c.key.method == "c2t"]
    assert {c.key for c in runner.measured} == {c.key for c in cells} - {c.key for c in lost}
    assert sum("its server is not running" in f for f in runner.failures) == len(lost)
    assert any("last words" in f for f in runner.failures) == (how == "broken")
    assert fleet.running == []


def test_interrupt_stops_all_servers_and_keeps_what_is_done(tmp_path: Path, fleet: Fleet) -> None:
    runner, cells = make_runner(tmp_path)

    def interrupted(cell: PlannedCell, *_: Any) -> Cell:
        if len(list((tmp_path / "cells").glob("*.jsonl"))) == 3:
            raise KeyboardInterrupt
        return made(cell)

    runner.measure = interrupted  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        runner.run(cells)
    assert fleet.started != []
    assert fleet.running == []
    assert [has_cell(tmp_path, c.key) for c in cells[:4]] == [True, True, True, False]


def test_cell_whose_prompts_were_not_in_the_cache_is_no_cell(tmp_path: Path) -> None:
    _, cells = make_runner(tmp_path)
    cell = made(cells[0])
    cached = tuple(replace(request, meta={"cached_tokens": 1}) for request in cell.requests)
    runner_module._check_cached(replace(cell, requests=cached))
    with pytest.raises(CellError, match=r"0 of \d+ prompt tokens came from the prefix cache"):
        runner_module._check_cached(cell)


def test_interrupt_does_not_wait_for_a_server_that_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever interrupts may kill us soon, and the server would be left over."""
    told = []

    @contextlib.contextmanager
    def starting(_launch: Any, _log_dir: Path, unwanted: threading.Event) -> Iterator[None]:
        time.sleep(0.3)  # the pool has started its thread
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        told.append(unwanted.wait(20.0))
        raise ServerError("not ready")
        yield

    monkeypatch.setattr(runner_module, "running", starting)
    runner, cells = make_runner(tmp_path, server__mode="in-turn")
    with pytest.raises(KeyboardInterrupt):
        runner.run(cells)
    assert told == [True]


def test_server_that_nobody_waits_for_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = server.start(never, os.environ, tmp_path / "log")
    monkeypatch.setattr(server, "start", lambda *_: process)
    unwanted = threading.Event()
    threading.Timer(0.5, unwanted.set).start()
    with (
        pytest.raises(ServerError, match="not needed any more"),
        server.running(server.Launch("never"), tmp_path, unwanted),
    ):
        raise AssertionError("it answered")
    assert process.poll() == -signal.SIGTERM


def test_method_is_warmed_up_once_and_one_that_plans_on_each_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests for each at once; who plans sees more, and none that is measured next."""
    kinds = [{"kind": "none"}, {"kind": "c2t", "policy": "auto"}]
    runner, cells = make_runner(
        tmp_path, requests__warm_up=5, requests__fresh_prompts=True, methods=kinds
    )
    sent: list[tuple[str, int, list[str]]] = []

    def load(url: str, bodies: list[Any], *, concurrency: int) -> None:
        sent.append((url, concurrency, [body["text"][-1] for body in bodies]))

    monkeypatch.setattr(runner_module, "run_load", load)
    for cell in cells:
        if cell.key.temperature > 0:
            continue
        (method,) = (m for m in runner.config.methods if m.name == cell.key.method)
        server: Any = types.SimpleNamespace(url=method.name, process=types.SimpleNamespace(pid=1))
        mine = [SAMPLES[number] for number in runner.numbers(cell)]
        runner._warm_up(cell, method, server, mine, {"temperature": 0.0})
    assert sorted(sent) == [
        ("auto", 1, ["3", "4", "5", "6", "7"]),
        ("auto", 4, ["3", "4", "5", "6", "7"]),
        ("no speculation", 1, ["0", "1"]),
    ]


def test_repeats_send_the_same_prompts_or_each_those_behind_the_last_ones(tmp_path: Path) -> None:
    load = [{"temperature": 0.0, "concurrency": [1, 4], "prompts": [3, 8]}]
    sent = {}
    for fresh in (False, True):
        runner, cells = make_runner(tmp_path, repeats=3, load=load, requests__fresh_prompts=fresh)
        mine = [cell for cell in cells if cell.key.method == "c2t" and cell.key.concurrency == 1]
        sent[fresh] = [runner.numbers(cell) for cell in mine]
        (whole, *_) = [runner.numbers(cell) for cell in cells if cell.key.concurrency == 4]
        assert whole == list(range(8))
    assert sent == {False: [[0, 1, 2]] * 3, True: [[0, 1, 2], [3, 4, 5], [6, 7, 0]]}


# -- conditions -----------------------------------------------------------------------------


def test_run_continues_under_the_same_conditions_only(tmp_path: Path) -> None:
    first = open_run(tmp_path, config(), DATASET)
    assert open_run(tmp_path, config(repeats=5), DATASET).started == first.started
    assert read_run(tmp_path).config["repeats"] == 5, "more repeats only add cells"
    with pytest.raises(RecordError, match=r"config\.requests\.max_new_tokens: 16 -> 17"):
        open_run(tmp_path, config(requests__max_new_tokens=17), DATASET)
    with pytest.raises(RecordError, match=r"methods\.1\.name: fixed 3 -> absent"):
        open_run(tmp_path, config(methods=[{"kind": "none"}]), DATASET)
    with pytest.raises(RecordError, match=r"dataset\.sha256: 00 -> 11"):
        open_run(tmp_path, config(), Dataset(SAMPLES, {**DATASET.facts, "sha256": "11"}))
    with pytest.raises(RecordError, match=r"revision: .* -> another"):
        open_run(tmp_path, config(), DATASET, "another")


# -- verdict --------------------------------------------------------------------------------


def other_output(cell: Cell) -> Cell:
    if cell.method != "fixed 3" or cell.temperature > 0:
        return cell
    return replace(cell, requests=tuple(replace(r, output_ids=(9,)) for r in cell.requests))


def other_metrics(cell: Cell) -> Cell:
    return replace(cell, metrics={"c2t:verifications_total{}": 1.0})


def same(cell: Cell) -> Cell:
    return cell


FIXED = [{"kind": "none"}, {"kind": "fixed", "num_steps": 3}]
GATED = [{"kind": "c2t", "policy": "c2t"}]


@pytest.mark.parametrize(
    ("code", "methods", "edit", "broken", "equal"),
    [
        (0, FIXED, same, "", "greedy"),
        (1, FIXED, other_output, "", "greedy"),
        (0, FIXED, other_output, "", "report"),
        (0, GATED, same, "", "greedy"),
        (1, GATED, other_metrics, "", "greedy"),
        (1, FIXED, same, "fixed-3", "greedy"),  # cells are missing
    ],
)
def test_exit_code_is_1_for_different_outputs_metrics_or_missing_cells(
    tmp_path: Path, fleet: Fleet, code: int, methods: Any, edit: Any, broken: str, equal: str
) -> None:
    fleet.broken = broken
    runner, cells = make_runner(tmp_path, methods=methods, requests__equal_outputs=equal)
    run = open_run(tmp_path, runner.config, DATASET)
    runner.run(cells)
    for cell in read_cells(tmp_path)[0]:
        write_cell(tmp_path, edit(cell))
    verdict = judge(tmp_path, runner.config, run, cells, runner.failures)
    assert module.report(verdict, Console(quiet=True), may_differ=equal == "report") == code


# -- the command ----------------------------------------------------------------------------


def test_command_lists_what_it_would_measure_or_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "tiny.toml", tmp_path / "run"
    path.write_text(TOML)
    argv = [str(path), "--out", str(folder)]
    assert main([*argv, "--list", "--prompts", "3", "5"]) == 0
    out = capsys.readouterr().out
    assert "6 cells (3 methods, 1 repeats), 24 requests, 576 tokens at most" in out
    assert "temperature 0, 4 at once: 5 prompts" in out
    for wrong, message in (
        (["--only", "c3t"], "--only: no method 'c3t'; known: no speculation, c2t"),
        (["--list", "--prompts", "3"], "lists of one length"),
    ):
        assert main([*argv, *wrong]) == 2
        assert message in capsys.readouterr().err
    path.write_text(TOML.replace("repeats = 1", "repeat = 1"))
    assert main(argv) == 2
    assert "repeat: unknown key" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.server
def test_tiny_run_on_real_servers_goes_on_and_shows_what_it_must(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three methods: outputs equal, metrics exact; one lost cell is measured again."""
    path, folder = tmp_path / "tiny.toml", tmp_path / "run"
    twice = TOML.replace("repeats = 1", "repeats = 2")
    fresh = twice.replace("[requests]", "[requests]\nfresh_prompts = true")
    path.write_text(fresh)
    assert main([str(path), "--out", str(folder)]) == 0, capsys.readouterr().out

    cells, broken = read_cells(folder)
    assert (len(cells), broken) == (12, [])
    verdict = json.loads((folder / CHECKS_FILE).read_text())
    assert verdict["outputs_compared"] == 40
    assert verdict["cells_with_metrics"] == 8
    small = sorted(cell.repeat for cell in cells if [r.index for r in cell.requests] == [2, 3])
    assert small == [1, 1, 1]
    for cell in cells:
        gated = cell.method != "no speculation"
        assert (cell.totals.verify_ct > 0) == gated
        assert bool(cell.metrics) == gated
        assert (cell.work["verify_rows"] > 0) == gated
        assert cell.output_tokens == sum(len(ids) for ids in cell.outputs) > 0
        assert all(r.prompt_len - r.meta["cached_tokens"] <= 2 for r in cell.requests)
    drafted = {c.method: c.totals.num_proposed_drafts for c in cells if c.concurrency == 4}
    assert drafted["c2t"] != drafted["dyjoint"], "each server has its own policy"

    (lost,) = (c for c in cells if (c.method, c.concurrency, c.repeat) == ("dyjoint", 4, 1))
    shutil.move(folder / "cells" / lost.key.file_name, tmp_path / "lost.jsonl")
    before = {file: file.stat().st_mtime_ns for file in (folder / "cells").iterdir()}
    assert main([str(path), "--out", str(folder)]) == 0, capsys.readouterr().out
    (again,) = (c for c in read_cells(folder)[0] if c.key == lost.key)
    assert again.outputs == lost.outputs
    assert again.totals == lost.totals
    assert {file: file.stat().st_mtime_ns for file in before} == before

    path.write_text(fresh.replace("max_new_tokens = 24", "max_new_tokens = 25"))
    assert main([str(path), "--out", str(folder)]) == 2
    assert "requests.max_new_tokens: 24 -> 25" in capsys.readouterr().err

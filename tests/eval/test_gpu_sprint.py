"""The sprint on stand-in servers: real processes with SGLang's flags, without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval.gpu import fleet, results, sprint
from eval.gpu.fleet import ServerSpec
from eval.gpu.plan import BIG, EMULATED, GPU, LITTLE, REST

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_sglang_server.py")

Sprint = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def servers_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sprint starts stand-ins, and its list of them is not another run's."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("EVAL_GPU_LAUNCHER", str(FAKE))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sprint:
    """Run a sprint in this process, and return its rows."""

    def running(*argv: str, gib: float = 80.0, **settings: Any) -> list[dict[str, Any]]:
        monkeypatch.setenv("FAKE_SGLANG", json.dumps(settings))
        monkeypatch.setattr(sprint.Sprint, "_about", lambda _: gib)
        monkeypatch.setattr(sprint, "RESERVE", 1.0)
        # A process that imported the modules long before it runs a sprint, as pytest does.
        monkeypatch.setattr(results, "_began", time.time() - 3600)
        out = tmp_path / "out"
        assert sprint.main(["--out", str(out), *argv]) == 0
        return rows_of(out)

    return running


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def of(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def test_sprint_of_all_server_stages_measures_every_method_at_every_batch(
    run: Sprint, tmp_path: Path
) -> None:
    rows = run("--stages", "answers", "first", "second", "little", "rest")
    assert of("failed", rows) == of("error", rows) == []
    cells = {(c["shape"], c["method"], c["batch"], c["repeat"]) for c in of("cell", rows)}
    wanted = {("8b", m.name, b, 0) for m in (*BIG, *REST) for b in GPU.batches}
    wanted |= {("8b", name, b, 1) for name in ("none", "auto", "c2t", "trees, auto")
               for b in GPU.batches}  # fmt: skip
    wanted |= {("1b", m.name, b, n) for m in LITTLE for b in GPU.batches for n in (0, 1)}
    assert cells == wanted | {("8b", "auto after c2t-plus", 64, 0)}
    answers = [(r["server"], r["method"], r["batch"]) for r in of("answers", rows)]
    both = ("answers-chains", "answers-trees")
    assert answers[:8] == [
        (name, method, batch)
        for name in both
        for method, batch in (("auto", 64), ("auto", 16), ("auto", 1), ("c2t-plus", 64))
    ]
    assert answers[8:] == [("auto", "c2t-plus", 64), ("auto", "auto", 64)]
    assert all(r["parted"] == 0 and not r["wrong"] and r["tau"] == 2 for r in of("answers", rows))
    assert [(r["server"], r["policy"]) for r in of("switched", rows) if not r["ok"]] == []
    assert len(of("start", rows)) == 12
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## 8b: decoded tokens/s" in text
    assert "## 1b: decoded tokens/s" in text
    assert "| auto after c2t-plus | - |" in text
    assert "fired up" in (tmp_path / "out" / "servers.log").read_text()


def test_sprint_on_a_gpu_of_140_gib_starts_four_servers_at_once(run: Sprint) -> None:
    rows = run("--stages", "first", "second", "--batches", "8", gib=140.0)
    assert [r["name"] for r in of("stage", rows)] == ["about", "start", "first"]
    assert {c["method"] for c in of("cell", rows)} > {"stock fixed 3", "packed fixed 1"}


def test_server_out_of_memory_starts_again_with_half_the_requests(
    run: Sprint, tmp_path: Path
) -> None:
    rows = run("--stages", "little", "--only", "little-none", memory=100)
    died, (up,) = of("died", rows), of("start", rows)
    assert [(r["requests"], r["cause"]) for r in died] == [
        (256, "out of memory"), (128, "out of memory"),
    ]  # fmt: skip
    assert up["requests"] == 64
    assert {c["batch"] for c in of("cell", rows)} == {1, 8, 32, 64}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "DIED little-none, 256 requests: out of memory" in text


def test_server_that_dies_otherwise_starts_again_with_its_fallback(run: Sprint) -> None:
    rows = run("--stages", "first", "--only", "none", "--batches", "8", broken=["fa3"])
    (died,), (up,) = of("died", rows), of("start", rows)
    assert (died["cause"], died["flags"]) == ("exit code 1", "")
    assert "set --mem-fraction-static" in died["log"], "SGLang's advice after any failed capture"
    assert up["flags"] == "--attention-backend flashinfer"
    assert {c["method"] for c in of("cell", rows)} == {"none"}


def test_stage_without_servers_is_an_error_and_the_next_one_is_measured(
    run: Sprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server for answers dies with every fallback; none of the other stage's does."""
    demo = GPU.answers_batches
    monkeypatch.setattr(ServerSpec, "with_fewer_requests", lambda self: None)
    monkeypatch.setattr(
        sprint, "GPU", sprint.replace(GPU, answers_batches=(*demo, 512), batches=(8,))
    )
    rows = run("--stages", "answers", "first", "--only", "answers-none", "none", memory=256)
    assert "no server without speculation" in of("error", rows)[0]["error"]
    assert [r["server"] for r in of("died", rows)] == ["answers-none"] * 3
    assert {c["method"] for c in of("cell", rows)} == {"none"}


def test_refused_switch_is_kept_and_the_sprint_goes_on(run: Sprint, tmp_path: Path) -> None:
    argv = ("--stages", "first", "--only", "none", "auto", "--batches", "8")
    rows = run(*argv, refused=["auto"])
    (there, back) = of("switched", rows)
    assert (there["policy"], there["ok"], there["error"]) == ("c2t-plus", True, "")
    assert (back["policy"], back["ok"]) == ("auto", False)
    assert "400" in back["error"]
    assert "start the server with it" in back["error"]
    assert {c["method"] for c in of("cell", rows)} == {"none", "auto", "c2t-plus"}
    assert "start the server with it" in (tmp_path / "out" / "report.md").read_text()


def test_wrong_answers_are_counted_with_the_place_and_the_tokens(run: Sprint) -> None:
    rows = run("--rehearse", "--stages", "answers", "--only", "answers-none", "answers-chains",
               wrong=True)  # fmt: skip
    first = of("answers", rows)[0]
    assert len(first["wrong"]) == first["parted"] == first["total"] == EMULATED.answers
    one = first["wrong"][0]
    assert one["place"] == 1
    assert one["got"] == one["top"][0][1] + 1 == one["top"][1][1], "a clear place excuses no token"


def started(tmp_path: Path, **settings: Any) -> tuple[subprocess.Popen[bytes], Path]:
    """A sprint in a process of its own that has measured a cell and waits for an answer."""
    out = tmp_path / "out"
    argv = ["--out", str(out), "--rehearse", "--stages", "first", "--only", "none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "eval.gpu.sprint", *argv],
        cwd=ROOT,
        env={**os.environ, "FAKE_SGLANG": json.dumps(settings)},
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "results.jsonl").exists() and of("cell", rows_of(out)):
            return process, out
        time.sleep(0.1)
    process.kill()
    raise AssertionError("no cell within a minute")


def test_sprint_out_of_time_keeps_what_it_measured_and_stops_its_servers(tmp_path: Path) -> None:
    process, out = started(tmp_path, hangs_after=3)
    (pid,) = map(int, (tmp_path / "tmp" / fleet.STARTED).read_text().split())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == sprint.OUT_OF_TIME
    assert not psutil.pid_exists(pid)
    (cell,) = of("cell", rows_of(out))
    assert (of("stage", rows_of(out))[-1]["name"], of("stage", rows_of(out))[-1]["error"]) == (
        "first", "cut off",
    )  # fmt: skip
    assert f"| none | {cell['tokens_per_second']:.0f}" in (out / "report.md").read_text()
    assert (out / "servers.log").read_text().startswith("==== 0-none")


def test_killed_sprint_leaves_its_rows_and_the_next_one_ends_its_servers(tmp_path: Path) -> None:
    process, out = started(tmp_path, hangs_after=3)
    (pid,) = map(int, (tmp_path / "tmp" / fleet.STARTED).read_text().split())
    process.kill()
    process.wait(timeout=30)
    assert psutil.pid_exists(pid)
    assert len(of("cell", rows_of(out))) == 1
    fleet.end_leftovers()
    gone = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() < gone
        time.sleep(0.05)
    assert not (tmp_path / "tmp" / fleet.STARTED).exists()


def test_cell_that_cannot_end_in_time_is_not_begun(run: Sprint) -> None:
    rows = run("--stages", "first", "--only", "none", "--budget", "4")
    assert of("cell", rows) == []
    assert of("stage", rows)[-1]["name"] == "first"


def test_fewer_requests_keep_the_smaller_graphs() -> None:
    spec = ServerSpec("none", "8b", (1, 8, 32, 64, 128, 256))
    halves = []
    while spec := spec.with_fewer_requests():  # type: ignore[assignment]
        halves.append(spec.batches)
    assert halves[0] == (1, 8, 32, 64, 128)
    assert halves[3] == (1, 8, 16)
    assert halves[-1] == (1,)


def test_every_server_of_the_plan_is_measured_or_compared() -> None:
    used = {method.server for method in (*BIG, *LITTLE, *REST)}
    assert used | {"answers-none", "answers-chains", "answers-trees"} == set(GPU.servers())
    assert GPU.servers().keys() == EMULATED.servers().keys()

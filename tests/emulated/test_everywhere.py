"""Processes that other programs start have the device, down to a benchmark over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.serve import ENVIRONMENT
from tests.emulated.versions import OLDEST, RELEASE

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"

#: As ``eval/gpu/sprint.sh`` has it.
PATH = os.pathsep.join((str(ROOT), str(SITE)))


def sourced() -> dict[str, str]:
    """Variables that ``env.sh`` exports."""
    shell = ["env", "-i", "bash", "-c", f"set -a; . {SITE}/env.sh; env"]
    lines = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def python(code: str, *args: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **sourced(), "PYTHONPATH": PATH},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_site_says_what_sglang_reads_on_this_device() -> None:
    assert ENVIRONMENT.items() <= sourced().items()


#: Run by a process that is spawned: what it makes of the device.
TOLD = """
import torch
from triton.runtime.interpreter import InterpretedFunction
numbers = torch.ones(3, device="cuda")
print(numbers.is_cuda, float(numbers.sum()), InterpretedFunction.run.__module__)
"""
SPAWNING = """
import multiprocessing, sys
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=exec, args=(sys.argv[1],))
    child.start()
    child.join()
    print("torch" in sys.modules)
"""


def test_a_spawned_process_has_the_device_and_one_without_torch_imports_none() -> None:
    assert python(SPAWNING, TOLD) == "True 3.0 tests.emulated.triton_interpreter\nFalse\n"


@pytest.mark.server
@pytest.mark.extended
def test_each_part_of_the_microbenchmark_runs(tmp_path: Path) -> None:
    """Takes as long as a server."""
    table = python(
        "import sys; from eval.gpu.microbench import main; sys.exit(main(sys.argv[1:]))",
        "--brief", "--batches", "2", "--out", str(tmp_path / "micro.json"),
    )  # fmt: skip
    rows = [line for line in table.splitlines() if "| B 2" in line]
    assert len(rows) == 12, table
    kept = json.loads((tmp_path / "micro.json").read_text())
    assert len(kept["rows"]) == 12
    assert kept["ceilings"]["bytes_per_s"] > 0


@pytest.mark.server
@pytest.mark.extended
@pytest.mark.skipif(RELEASE is OLDEST, reason="its launcher compiles kernels that nobody replaces")
def test_sprint_rehearsed_over_http_compares_answers_and_measures_cells(tmp_path: Path) -> None:
    """Two of its servers, started by its script: grafts, CUDA graphs, switches, report."""
    done = subprocess.run(
        ["bash", "eval/gpu/sprint.sh", "--rehearse", "--slow", "10", "--revision", "abc",
         "--stages", "first", "--only", "none", "auto", "--batches", "4"],
        env={**os.environ, "SITE": str(SITE), "OUT": str(tmp_path), "PYTHON": sys.executable,
             "BUDGET": "840", "TMPDIR": str(tmp_path)},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    assert kinds["died"] == kinds["failed"] == kinds["error"] == [], done.stdout
    assert [row["revision"] for row in kinds["about"]] == ["abc"]
    assert {row["server"] for row in kinds["start"]} == {"none", "auto"}
    for row in kinds["answers"]:
        assert row["wrong"] == []
        assert row["tau"] > 1, "drafts of the grafted head are accepted"
    assert {row["method"] for row in kinds["answers"]} >= {"c2t-plus"}
    cells = {row["method"]: row for row in kinds["cell"]}
    assert cells.keys() >= {"none", "auto", "c2t-plus", "auto after c2t-plus"}
    assert all(cell["tokens_per_second"] > 0 and cell["batch"] == 4 for cell in cells.values())
    assert cells["c2t-plus"]["rows"] > cells["none"]["rows_per_step"]
    (state,) = kinds["c2t state"]
    assert state["state"]["serving"][0]["packed"], "verified full width"
    assert "| c2t-plus |" in (tmp_path / "report.md").read_text()
    assert "cuda graph: True" in (tmp_path / "servers.log").read_text()

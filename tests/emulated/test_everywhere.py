"""Processes that somebody else starts have the device, down to a benchmark over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval import run
from eval.bench.config import BenchConfig, as_dict, build, read_config
from eval.bench.records import read_cells
from eval.gpu.check import CONFIG
from tests.emulated.serve import ENVIRONMENT
from tests.emulated.versions import OLDEST, RELEASE

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"

#: As ``eval/gpu/session.sh`` has it.
PATH = os.pathsep.join((str(ROOT), str(SITE)))


def sourced() -> dict[str, str]:
    """What ``env.sh`` exports."""
    shell = ["env", "-i", "bash", "-c", f"set -a; . {SITE}/env.sh; env"]
    lines = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def python(code: str, *args: str) -> str:
    """What a fresh interpreter prints."""
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
def test_each_part_of_the_microbenchmark_runs(tmp_path: Path) -> None:
    """Takes as long as a server."""
    ceilings = tmp_path / "ceilings.json"
    ceilings.write_text(json.dumps({"gpu": "made up", "bytes_per_s": 4e12, "flops_per_s": 8e14}))
    table = python(
        "import sys; from eval.gpu.microbench import main; sys.exit(main(sys.argv[1:]))",
        "--brief", "--batches", "2", "--ceilings", str(ceilings),
    )  # fmt: skip
    rows = [line for line in table.splitlines() if "| B 2" in line]
    assert len(rows) == 16, table


@pytest.mark.server
@pytest.mark.skipif(RELEASE is OLDEST, reason="its launcher compiles kernels that nobody replaces")
def test_a_gpu_check_walks_its_traces_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two gates, whose server is the launcher's; exit code 0 says that every request took the
    verifications of its trace.
    """
    table = as_dict(run.shaped(read_config(CONFIG), "toy"))
    table["server"]["env"] = sourced()  # not for this process, whose Triton does not interpret
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setattr(run, "read_config", lambda _: build(BenchConfig, table, ""))
    argv = ["check", "--only", "c2t", "dymax", "--at-once", "4", "--out", str(tmp_path)]
    assert run.main(argv) == 0
    cells, _ = read_cells(tmp_path)
    assert {cell.method for cell in cells} == {"c2t", "dymax"}
    log = (tmp_path / "logs" / "shared-1.log").read_text()
    assert "cuda graph: True" in log
    assert "verification of chains" in log, "verified full width"

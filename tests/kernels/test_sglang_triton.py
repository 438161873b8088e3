"""SGLang's own Triton kernels accept our packed trees, unchanged. Runs without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]


def interpret(case: str) -> None:
    """One case of `triton_worker` in a fresh process, by Triton's interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("SGLANG_USE_CPU_ENGINE", None)  # makes SGLang ask for sgl_kernel's CPU ops
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_worker", case],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def test_the_greedy_verify_kernel_accepts_the_same_paths_as_ours_and_as_loops() -> None:
    interpret("verify")


def test_the_extend_attention_kernel_sees_ragged_trees_as_dense_attention_does() -> None:
    interpret("attention")

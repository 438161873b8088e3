"""Worker modules in processes of their own: Triton reads its settings once, when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_worker(worker: str, *arguments: str) -> str:
    """What ``tests.kernels.WORKER`` printed, by Triton's interpreter; fails with its error."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("SGLANG_USE_CPU_ENGINE", None)  # makes SGLang ask for sgl_kernel's CPU ops
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{worker}", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

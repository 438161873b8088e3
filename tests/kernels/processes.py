"""Worker modules in processes of their own: Triton reads its settings once, when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_worker(worker: str, *arguments: str, interpret: bool = True, **env: str) -> str:
    """What ``tests.kernels.WORKER`` printed, by Triton's interpreter or without it.

    ``env`` goes on top of the environment. Fails with the worker's own error.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    inherited.pop("SGLANG_USE_CPU_ENGINE", None)  # makes SGLang ask for sgl_kernel's CPU ops
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{worker}", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **env},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

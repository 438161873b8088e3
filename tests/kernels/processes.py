"""Triton's interpreter, in processes of its own: Triton reads its settings once, when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_worker(worker: str, function: str = "main") -> str:
    """Output of a function of ``tests.kernels.WORKER``; fails with the worker's own error."""
    module = f"tests.kernels.{worker}"
    # Without the interpreter the twins would be compared with themselves.
    code = (
        f"import triton, {module} as worker, tests.interpreter as interpreter\n"
        "assert triton.knobs.runtime.interpret\n"
        f"with interpreter.hastened(): worker.{function}()"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("SGLANG_USE_CPU_ENGINE", None)  # makes SGLang ask for sgl_kernel's CPU ops
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

"""Servers on a GPU: what to put on their command line and in their environment.

The machine brings SGLang itself: installed, or unpacked into a folder named by ``--site``, which
then goes onto PYTHONPATH together with this checkout and our entry points.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eval.gpu import plugins
from eval.server import Launch

ROOT = Path(__file__).parents[2]

#: Tokens come back as ids and prompts are never shared, so nothing else needs to run.
FLAGS = (
    "--disable-radix-cache",
    "--grammar-backend", "none",
    "--disable-prefill-cuda-graph",  # not measured, and takes long to capture
    "--mm-feature-transport", "cpu",  # the default reserves 1 GiB of GPU memory for images
    "--log-level-http", "warning",
)  # fmt: skip


class GPULaunch(Launch):
    """A server on the GPU; ``flags`` as typed, nothing added for a CPU."""

    def argv(self, port: int) -> list[str]:
        """The command line a user would type."""
        return [
            *_interpreter(), "--model-path", str(self.model),
            "--host", "127.0.0.1", "--port", str(port), *FLAGS, *self.flags,
        ]  # fmt: skip


def _interpreter() -> list[str]:
    """``python -m sglang.launch_server``, or a stand-in for it in EVAL_GPU_LAUNCHER."""
    launcher = os.environ.get("EVAL_GPU_LAUNCHER", "-m sglang.launch_server")
    return [sys.executable, *launcher.split()]


def environment(
    work: Path, *, only: Sequence[str], site: Path | None = None, more: Mapping[str, str] = {}
) -> dict[str, str]:
    """What a server needs beyond the caller's environment.

    Args:
        work: Where the entry points are written.
        only: Plugins to load, by the names in :mod:`~eval.gpu.plugins`.
        site: Folder with SGLang and what it needs, if it is not installed.
        more: Goes on top.
    """
    parts = [plugins.write(work / "plugins"), ROOT, site, os.environ.get("PYTHONPATH")]
    return {
        "SGLANG_USE_CPU_ENGINE": "0",
        "SGLANG_C2T_COUNTERS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "8"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(str(part) for part in parts if part),
        "SGLANG_PLUGINS": ",".join(only),
        **more,
    }


def speculative_flags(
    draft: Path, num_steps: int, *, algorithm: str = "EAGLE3", topk: int = 1, nodes: int = 0
) -> tuple[str, ...]:
    """Chains of ``num_steps`` drafts, or trees of up to ``nodes`` nodes with ``topk`` above 1."""
    return (
        "--speculative-algorithm", algorithm,
        "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", str(num_steps),
        "--speculative-eagle-topk", str(topk),
        "--speculative-num-draft-tokens", str(nodes or num_steps + 1),
    )  # fmt: skip

"""``compare`` with SGLang's own servers: one command, the four of them, equal outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval.server import CPU_FLAGS, TARGET, environment, speculative_flags


@pytest.mark.extended  # four starts; tests/offline has the rest of it
def test_compare_starts_four_servers_whose_outputs_agree(tmp_path: Path) -> None:
    launch = ("--model-path", str(TARGET), *CPU_FLAGS, *speculative_flags("EAGLE3", 3))
    # SGLang's adaptive rule does not start on a CPU otherwise.
    launch += ("--disable-cuda-graph",)
    options = ("--at-once", "2", "--repeats", "1", "--max-new-tokens", "16", "--out", str(tmp_path))
    argv = [sys.executable, "-m", "sglang_c2t", "compare", *options, "--side-by-side", "--"]
    done = subprocess.run(
        [*argv, *launch], capture_output=True, text=True, timeout=600, env=environment({})
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All outputs are equal." in done.stdout
    found = json.loads((tmp_path / "compare.json").read_text())
    lengths = {one["server"]: one["loads"]["2"]["accept_length"] for one in found}
    assert lengths["no speculation"] is None
    assert min(lengths[name] for name in ("as-is", "adaptive", "--c2t")) > 1.0

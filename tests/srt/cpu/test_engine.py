"""`sglang_c2t.srt.cpu.engine` where it must act, where it must not, and where it must fail."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(code: str, cpu_engine: bool) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: SGLang decides once per process what kind of machine it is on."""
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1" if cpu_engine else "0"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env
    )


def test_without_the_cpu_engine_nothing_is_touched():
    """On a GPU server install() is a no-op: no path, no module, no name."""
    done = run(
        "import sys; before = list(sys.path)\n"
        "from sglang_c2t.srt.cpu import engine as cpu_engine\n"
        "print(cpu_engine.install(), cpu_engine.supplied(), sys.path == before,"
        " 'sgl_kernel' in sys.modules)",
        cpu_engine=False,
    )
    assert done.stdout.splitlines()[-1] == "[] [] True False", done.stderr


def test_install_names_a_missing_seam_and_else_reports_what_it_supplied():
    """An SGLang that renamed a symbol fails loudly, with the symbol and the version.

    The second call and supplied() give the same names; the sampler of verification is ours.
    """
    done = run(
        "from importlib import metadata\n"
        "from sglang_c2t.srt.cpu import engine as cpu_engine\n"
        "import sglang.srt.layers.attention.attention_registry as registry\n"
        "kept = registry.__dict__.pop('ATTENTION_BACKENDS')\n"
        "try:\n"
        "    cpu_engine.install()\n"
        "except ValueError as error:\n"
        "    print(metadata.version('sglang') in str(error), error)\n"
        "registry.ATTENTION_BACKENDS = kept\n"
        "names = cpu_engine.install()\n"
        "from sglang.srt.speculative import eagle_utils, eagle_worker_common\n"
        "assert eagle_worker_common.eagle_sample is eagle_utils.eagle_sample\n"
        "assert eagle_utils.eagle_sample.__wrapped__ is not eagle_utils.eagle_sample\n"
        "print(names == cpu_engine.install() == cpu_engine.supplied(),"
        " any('samples' in name for name in names))",
        cpu_engine=True,
    )
    if "libcuda" in done.stderr:
        pytest.skip("SGLang's registry cannot be imported before install() on this machine")
    refusal, supplied = done.stdout.splitlines()[-2:]
    assert refusal.startswith("True"), done.stderr
    assert "attention_registry.ATTENTION_BACKENDS" in refusal
    assert supplied == "True True", done.stderr

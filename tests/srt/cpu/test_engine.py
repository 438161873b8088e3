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


def test_layers_and_heads_multiply_by_packed_weights_that_follow_updates():
    """A layer is packed when it is loaded; an update of the weights, even a failed one, packs it
    again.
    """
    done = run(
        "import contextlib, types, torch\n"
        "from sglang_c2t.srt.cpu import engine as cpu_engine\n"
        "cpu_engine.install()\n"
        "from sglang.srt.layers.logits_processor import LogitsProcessor\n"
        "from sglang.srt.layers.quantization import unquant\n"
        "from sglang.srt.managers.scheduler_components import weight_updater\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "HookRegistry.apply_hooks()\n"
        "weight = torch.nn.Parameter(torch.randn(512, 1024), requires_grad=False)\n"
        "layer = types.SimpleNamespace(weight=weight)\n"
        "method, x = unquant.UnquantizedLinearMethod(), torch.randn(8, 1024)\n"
        "head = types.SimpleNamespace(weight=weight,\n"
        "    quant_method=unquant.UnquantizedEmbeddingMethod())\n"
        "processor = types.SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)\n"
        "def same(one, other): torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)\n"
        "logits = lambda: LogitsProcessor._compute_lm_head(processor, x, head)\n"
        "method.process_weights_after_loading(layer)\n"
        "print(hasattr(weight, 'c2t_packed'))\n"
        "first = method.apply(layer, x)\n"
        "same(first, x @ weight.T)\n"
        "print(torch.equal(first, logits()))\n"
        "weight.data.add_(1.0)\n"
        "manager = weight_updater.SchedulerWeightUpdaterManager\n"
        "with contextlib.suppress(AttributeError):\n"
        "    manager.update_weights_from_tensor(object(), object())\n"
        "same(method.apply(layer, x), x @ weight.T)\n"
        "same(logits(), x @ weight.T)\n"
        "print('updated')",
        cpu_engine=True,
    )
    if "libcuda" in done.stderr:
        pytest.skip("SGLang's registry cannot be imported before install() on this machine")
    assert done.stdout.split()[-3:] == ["True", "True", "updated"], done.stderr

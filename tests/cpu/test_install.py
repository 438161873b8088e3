"""The stand-in package and `sglang_c2t.cpu.install`, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def _run(code: str) -> str:
    """Output of a fresh interpreter: what is bound in one test may not leak into the next."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_WHEEL = """
import sys, types
class Broken:
    def find_spec(self, name, path=None, target=None):
        folders = [p for p in sys.path if p.endswith("stand_in")]
        if name == "sgl_kernel" and not folders:
            raise ImportError("libcuda.so.1: cannot open shared object file")
sys.meta_path.insert(0, Broken())
from sglang_c2t import cpu
"""


def test_the_stand_in_serves_the_ops_and_names_what_it_lacks():
    """Ops work through the package and through torch.ops; other names raise, naming themselves."""
    out = _run(
        NO_WHEEL
        + """
import torch
bound = cpu.install()
assert len(bound) == len(cpu.OPS) + 1, bound
import sgl_kernel
assert sgl_kernel.IS_STAND_IN
from sgl_kernel import verify_tree_greedy_cpu, build_tree_kernel_efficient_cpu
assert not hasattr(sgl_kernel, "moe_sum")
try:
    sgl_kernel.decode_attention_cpu
except AttributeError as error:
    print(error)
try:
    from sgl_kernel import fast_topk
except ImportError as error:
    print(error)
bonus = torch.empty(1, dtype=torch.int32)
torch.ops.sgl_kernel.fill_bonus_tokens_cpu(torch.tensor([4, 5]), torch.tensor([2]), bonus, 2)
assert bonus.item() == 5
"""
    )
    assert "sgl_kernel.decode_attention_cpu is not available" in out
    assert "fast_topk" in out


def test_install_binds_once_and_leaves_the_version_of_the_wheel_readable():
    """SGLang checks the installed sglang-kernel version through importlib.metadata."""
    out = _run(
        NO_WHEEL
        + """
from importlib import metadata
cpu.install()
print(cpu.install(), sys.path.count(str(cpu.stand_in_folder())))
import sgl_kernel
print(metadata.version("sglang-kernel") == sgl_kernel.__version__)
"""
    )
    assert out.splitlines() == ["[] 1", "True"]


@pytest.mark.parametrize("missing", [[], ["murmur_hash32_cpu"]])
def test_only_what_the_real_package_lacks_is_bound(missing):
    """It stays what is imported, and its own ops stay its own."""
    out = _run(f"""
import sys, types, torch
from sglang_c2t import cpu
sys.modules["sgl_kernel"] = types.ModuleType("sgl_kernel")
library = torch.library.Library("sgl_kernel", "DEF")
for name in set(cpu.OPS) - set({missing}):
    library.define(name + cpu.OPS[name].schema)
before = list(sys.path)
print(cpu.install(), sys.path == before, hasattr(sys.modules["sgl_kernel"], "IS_STAND_IN"))
""")
    assert out.strip() == f"{[f'sgl_kernel.{name}' for name in missing]} True False"

"""``python -m tests.e2e.vision_server``: SGLang's server for Qwen-VL on any CPU.

SGLang reads the images of all Qwen models with one module, whose imports look four kernels of
Qwen3.5 up that no other model calls. Where they are missing they are declared here, and nothing
more: in every process, since spawned ones import the main module first.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch

LOOKED_UP = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)

_library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in LOOKED_UP:
    if not hasattr(torch.ops.sgl_kernel, _name):
        _library.define(f"{_name}(Tensor x) -> ()")

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")

"""Where SGLang finds its compiled kernels, and the references that it finds there instead.

Three libraries bring them, and each is taken at the place where SGLang loads it: ``sgl_kernel``
(operations of torch), SGLang's own that are compiled when they are first used, and FlashInfer,
whose Python runs as it is while its compiled ``plan`` and ``run`` are these. A kernel without a
reference ends the program that launches it. What only some releases have is in ``versions.py``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from tests.emulated import kernels
from tests.emulated.device import OPERATIONS, launch
from tests.emulated.versions import RELEASE

#: Operations of ``sgl_kernel``: schema, and the reference or what is done at once.
SGL_KERNEL: dict[str, Callable[..., Any]] = {
    "rmsnorm(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()":
        kernels.rmsnorm,
    "fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps, bool enable_pdl)"
    " -> ()": kernels.fused_add_rmsnorm,
    "silu_and_mul(Tensor! out, Tensor input) -> ()":
        lambda out, x: kernels.activation(x, out, "silu"),
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, "
    "Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad, "
    "Tensor! cumsum_buffer, bool pad_sorted_token_ids, bool ignore_invalid_expert) -> ()":
        kernels.moe_align_block_size,
    "moe_sum_reduce(Tensor input, Tensor output, float routed_scaling_factor) -> ()":
        kernels.moe_sum_reduce,
    **RELEASE.operations,
}  # fmt: skip

#: Functions of modules that are compiled when they are first used, by module and function.
COMPILED: dict[str, Callable[..., None]] = {
    "norm.rmsnorm": kernels.rmsnorm,
    "norm.fused_add_rmsnorm": kernels.fused_add_rmsnorm,
    "quantization.segment_packbits": kernels.segment_packbits,
    "cascade.merge_state": kernels.merge_state,
    "rmsnorm.rmsnorm": kernels.jit_rmsnorm,
    "fused_add_rmsnorm.fused_add_rmsnorm": kernels.fused_add_rmsnorm,
    "activation.run_activation": kernels.activation,
    "fused_rope.run_rope": kernels.rope,
    "fused_rope.run_rope_store": kernels.rope_and_store,
    "rotary_embedding.rotary_embedding": kernels.rotary_embedding,
    "clamp_position.clamp_position": kernels.clamp_position,
    "dsv3_fused_a_gemm.dsv3_fused_a_gemm": kernels.matmul,
    "fused_eh_norm.fused_eh_norm": kernels.fused_eh_norm,
    "set_mla_kv_buffer.set_mla_kv_buffer": kernels.set_mla_kv_buffer,
    "concat_mla_k.concat_mla_k": kernels.concat_mla_k,
    **RELEASE.compiled,
}

#: Of these the arguments with which a module was made matter.
_MADE_FOR = {"fused_rope.run_rope", "fused_rope.run_rope_store"}


class _Compiled:
    """A module that a compiler would have made."""

    def __init__(self, name: str, made_for: tuple[Any, ...] = ()) -> None:
        self._name, self._made_for = name, made_for

    def __getattr__(self, function: str) -> Callable[..., None]:
        if function.startswith("__"):
            raise AttributeError(function)
        key = f"{self._name}.{function}"
        if key not in COMPILED:
            raise NotImplementedError(f"no reference for the compiled kernel {key}")
        kernel = COMPILED[key]
        if key in _MADE_FOR:
            kernel = functools.partial(kernel, made_for=self._made_for)
        return functools.partial(launch, key, kernel)


@contextmanager
def without_libraries() -> Iterator[None]:
    """``sgl_kernel`` can be imported inside the block, without its libraries, which need a driver:
    for a process of its own.
    """
    for library in ("flash_ops", "flashmla_ops", "spatial_ops"):
        sys.modules[f"sgl_kernel.{library}"] = ModuleType(library)
    sys.modules["deep_gemm"] = RELEASE.deep_gemm
    find = importlib.util.spec_from_file_location

    class Nothing:
        def create_module(self, spec: ModuleSpec) -> ModuleType:
            return ModuleType(spec.name)

        def exec_module(self, module: ModuleType) -> None:
            pass

    def without_operations(name: str, location: Any = None, **options: Any) -> Any:
        if name != "common_ops":
            return find(name, location, **options)
        empty = ModuleSpec(name, Nothing(), origin=str(location))
        empty.has_location = True
        return empty

    with patch.object(importlib.util, "spec_from_file_location", without_operations):
        yield


_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def define_operations() -> None:
    """The operations of ``sgl_kernel`` that there are references for."""
    for schema, kernel in SGL_KERNEL.items():
        name = "sgl_kernel::" + schema.partition("(")[0]
        _library.define(schema)
        OPERATIONS[name] = functools.partial(launch, name, kernel)
    _library.define("weak_ref_tensor(Tensor tensor) -> Tensor")
    OPERATIONS["sgl_kernel::weak_ref_tensor"] = lambda tensor: tensor.view(tensor.shape)


@contextmanager
def served() -> Iterator[None]:
    """SGLang and FlashInfer find these kernels inside the block."""
    import flashinfer.decode
    import flashinfer.jit.core
    import flashinfer.prefill
    import sgl_kernel.flash_attn
    import sglang.kernels.ops.attention.flash_attention_v3 as fa3

    loaders = [importlib.import_module(name) for name in RELEASE.loaders]
    without = [(importlib.import_module(name), what) for name, what in RELEASE.without.items()]
    compiled = loaders[0].load_jit

    def load_jit(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cuda_files") or kwargs.get("external_cuda_files"):
            # Some modules are made for sizes, and named by them.
            return _Compiled(re.sub(r"(_\d+)+$", "", str(args[0])), args[1:])
        return compiled(*args, **kwargs)

    def load_flashinfer(spec: Any) -> Any:
        name, adapt = spec.name.split("_dtype")[0], getattr(spec, "post_load_adapter", None)
        if not name.startswith("batch_mla_attention"):
            return _Compiled(name)
        module = kernels.mla_module(staged=adapt is not None)
        return module if adapt is None else adapt(module)

    attention = {
        "flash_attn_with_kvcache": kernels.flash_attn_with_kvcache,
        "flash_attn_varlen_func": kernels.flash_attn_varlen_func,
        "get_scheduler_metadata": kernels.get_scheduler_metadata,
    }
    with ExitStack() as stack:
        for owner, instead in (
            *((module, {"load_jit": load_jit}) for module in loaders),
            *without,
            (flashinfer.jit.core.JitSpec, {"build_and_load": load_flashinfer}),
            (flashinfer.prefill, {"get_batch_prefill_module": kernels.prefill_module}),
            (flashinfer.decode, {"get_batch_prefill_module": kernels.prefill_module,
                                 "get_batch_decode_module": kernels.decode_module}),
            (sgl_kernel.flash_attn, attention),
            (fa3, {"_load_fa3_kernels": lambda: attention}),
            (torch.ops, {"load_library": lambda _: None}),  # all need a driver
        ):  # fmt: skip
            stack.enter_context(patch.multiple(owner, **instead))
        yield

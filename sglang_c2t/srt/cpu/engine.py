"""Makes SGLang's CPU engine run without its Intel AMX kernels.

`install` supplies only what SGLang lacks:

* the ``sgl_kernel`` ops of the speculative path (`sglang_c2t.cpu`),
* an attention backend for prefill, decode, draft decode and tree verification, under the name
  ``intel_amx``, so that all SGLang rules for its CPU backend still apply,
* matrix products with packed weights, which it has for AMX only,
* verification that samples: SGLang verifies greedily on CPU at any temperature.

It does nothing unless SGLang runs its CPU engine (``SGLANG_USE_CPU_ENGINE=1``).
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_c2t import cpu
from sglang_c2t.cpu import OPS, linear
from sglang_c2t.srt import attach, seams
from sglang_c2t.srt.probes import parameters_of

__all__ = ["install", "supplied"]

logger = logging.getLogger(__name__)

BACKEND = "intel_amx"  # SGLang's name for "the CPU attention backend"

_supplied: list[str] = []


def install() -> list[str]:
    """Supply what SGLang's CPU engine lacks; returns the names, [] off the CPU engine."""
    if not _is_cpu_engine() or _supplied:
        return supplied()
    names = cpu.install()
    seams.require_seams(seams.CPU_SEAMS)  # afterwards, because their import may need a stand-in
    if getattr(importlib.import_module("sgl_kernel"), "IS_STAND_IN", False):
        stand_in = "sgl_kernel: stand-in package"  # a spawned process inherits it with sys.path
        names = [stand_in, *(name for name in names if "stand-in" not in name)]
    from sglang.srt.utils.common import cpu_has_amx_support

    if not cpu_has_amx_support():
        _install_attention()
        names.append(f"attention backend {BACKEND}: torch, with tree masks and ragged verify")
        if linear.available(torch.float32):
            _install_products()
            names.append("weights packed by oneDNN, beside the originals")
        _find_last_slots()
        names.append("--page-size: slots behind which pages go on")
        names.append("--enable-deterministic-inference: seeds, without batch-invariant kernels")
    attach.write(torch.cuda, synchronize=_nothing_to_wait_for)
    _send_from_host()
    _adapt_unpinned()
    names.append("LoRA: memory that is not pinned")
    _leave_nccl_out()
    names.append("tensor parallelism over gloo: NCCL left out")
    if _supply_seed_hash(OPS["murmur_hash32_cpu"].run):
        names.append("hash of --enable-deterministic-inference")
    _install_sampling()  # SGLang has no sampling verification on any CPU
    names.append("speculative verification that samples")
    _supplied.extend(names)  # last: a failed install is repeated, and fails again
    return supplied()


def supplied() -> list[str]:
    """Return the names that `install` supplied in this process."""
    return list(_supplied)


def _is_cpu_engine() -> bool:
    from sglang.srt.utils.common import is_cpu

    return bool(is_cpu())


# -- attention ----------------------------------------------------------------------------


def _install_attention() -> None:
    """Register our backend as `intel_amx`, and keep SGLang from replacing it by torch_native."""
    _keep_backend_name()
    _allow_deterministic_inference()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    ATTENTION_BACKENDS[BACKEND] = _create_backend
    attach.write(
        DraftBackendFactory,
        _create_intel_amx_decode_backend=_create_draft_decode_backend,
        _create_intel_amx_prefill_backend=_create_draft_extend_backend,
    )


def _create_backend(runner: Any) -> Any:
    from sglang_c2t.srt.cpu.attention import TorchCpuAttnBackend

    return TorchCpuAttnBackend(runner)


def _create_draft_decode_backend(factory: Any) -> Any:
    from sglang_c2t.srt.cpu.attention import TorchCpuMultiStepDraftBackend

    backend = TorchCpuMultiStepDraftBackend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )
    return _made_backend(factory, BACKEND, backend)


def _create_draft_extend_backend(factory: Any) -> Any:
    return _made_backend(factory, BACKEND, _create_backend(factory.draft_model_runner))


def _keep_backend_name() -> None:
    """Keep `intel_amx`, which SGLang replaces by `torch_native` (no verification) without AMX."""

    def keep(server_args: Any, previous: Callable[[Any], None]) -> None:
        module, name = _attention_fallback()
        fall_back = getattr(module, name)

        def stay(view: Any) -> dict[str, Any]:
            ours = view.attention_backend == BACKEND and view.device == "cpu"
            return {} if ours else fall_back(view)

        with attach.swapped(module, name, stay):
            previous(server_args)

    attach.on_resolution("handle_attention_backend_compatibility", keep)


def _allow_deterministic_inference() -> None:
    """Allow --enable-deterministic-inference, which per-request seeds need and SGLang refuses."""
    choices = _backend_choices()
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    package = "sglang.srt.batch_invariant_ops"  # ModelRunner imports the function from here
    attach.write(importlib.import_module(package), enable_batch_invariant_mode=_only_seeds)


def _only_seeds(enable_bmm: bool = True) -> None:
    """Skip SGLang's batch-invariant matrix products, which are Triton kernels; torch's remain."""
    logger.warning(
        "Deterministic inference on CPU: draws depend on seed and position only, but matrix "
        "products may differ in the last bit with the batch they run in."
    )


def _find_last_slots() -> None:
    """Use SGLang's torch version, which it uses only with torch_native attention. Speculation needs
    it if pages hold more than one token.
    """
    from sglang.srt.mem_cache import allocation

    attach.write(allocation, get_last_loc_triton=allocation.get_last_loc_torch)


def _nothing_to_wait_for(device: Any = None) -> None:
    """Replace a wait for a GPU in some of SGLang's models when they get their draft's head."""


# -- matrix products ----------------------------------------------------------------------


def _install_products() -> None:
    """Multiply unquantized layers and output heads by `sglang_c2t.cpu.linear`. Layers are packed
    when they are loaded, so that SGLang sees how much memory is left for keys.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    stock = LogitsProcessor._compute_lm_head

    @functools.wraps(stock)
    def compute(
        self: Any, hidden_states: Any, lm_head: Any, embedding_bias: Any = None, **out: Any
    ) -> Any:
        if not _is_plain_head(self, lm_head):
            return stock(self, hidden_states, lm_head, embedding_bias, **out)
        return linear.linear(hidden_states.to(lm_head.weight.dtype), lm_head.weight)

    attach.write(UnquantizedLinearMethod, apply=_apply, process_weights_after_loading=_pack)
    attach.write(LogitsProcessor, _compute_lm_head=compute)
    for label in ("update_weights", "survive_update", "check_weights"):
        attach.hook(label, _forget, "before")


def _pack(_method: Any, layer: Any) -> None:
    linear.pack(layer.weight)


def _forget(*_args: Any, **_kwargs: Any) -> None:
    linear.forget()


def _apply(_method: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
    return linear.linear(x, layer.weight, bias)


def _is_plain_head(processor: Any, lm_head: Any) -> bool:
    """Whether SGLang would multiply by ``lm_head.weight`` in the weight's own dtype."""
    method = type(getattr(lm_head, "quant_method", None)).__name__
    return (
        method in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
        and not hasattr(lm_head, "set_lora")
        and not processor.use_fp32_lm_head
        and processor.rl_on_policy_target is None
    )


# -- disaggregation -----------------------------------------------------------------------


def _send_from_host() -> None:
    """Send keys to a decode server from the host, without waiting for a GPU."""
    attach.hook("init_disaggregation", _name_slots_at_once, "after")


def _name_slots_at_once(_result: None, _scheduler: Any) -> None:
    """Keep Mooncake's sender from using pinned memory and a GPU event. It reads the module only if
    SGLang has imported it. Older SGLang has no such option.
    """
    sender = getattr(
        sys.modules.get("sglang.srt.disaggregation.mooncake.conn"), "MooncakeKVSender", None
    )
    if hasattr(sender, "supports_host_tensor_indices"):
        attach.write(sender, supports_host_tensor_indices=False)


# -- LoRA ---------------------------------------------------------------------------------


class _Unpinned(TorchFunctionMode):
    """Ignores requests for pinned memory inside the block, because that needs a GPU driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})


def _adapt_unpinned() -> None:
    """Make SGLang's LoRA, torch_native included, work without pinned memory."""
    attach.hook("pin_adapters", _unpinned, "around")


def _unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Unpinned():
        return original(*args, **kwargs)


# -- tensor parallelism -------------------------------------------------------------------


def _leave_nccl_out() -> None:
    """Make SGLang use gloo, as without NCCL; torch's CUDA build has NCCL even on a CPU."""
    pynccl = "sglang.srt.distributed.device_communicators.pynccl"
    attach.write(importlib.import_module(pynccl), NCCLLibrary=_no_nccl)


def _no_nccl(*args: Any, **kwargs: Any) -> None:
    # PyNcclCommunicator catches this and disables itself
    raise OSError("no NCCL on SGLang's CPU engine")


# -- sampling -----------------------------------------------------------------------------


def _install_sampling() -> None:
    """Wrap `eagle_sample` in all modules that imported it."""
    from sglang.srt.speculative import eagle_utils as utils

    stock = utils.eagle_sample

    @functools.wraps(stock)
    def eagle_sample(
        verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if batch.forward_mode.is_idle() or batch.sampling_info.is_all_greedy:
            return stock(verify_input, batch, logits_output, *args, **kwargs)
        match = _matching_sampled(utils, verify_input, batch, logits_output)
        with attach.swapped(utils, "verify_tree_greedy_func", match):
            return stock(verify_input, batch, logits_output, *args, **kwargs)

    attach.write(utils, eagle_sample=eagle_sample)
    for name in ("eagle_worker_common", "ngram_worker"):
        module = sys.modules.get(f"sglang.srt.speculative.{name}")
        if module is not None and getattr(module, "eagle_sample", None) is stock:
            attach.write(module, eagle_sample=eagle_sample)


def _matching_sampled(
    utils: ModuleType, verify_input: Any, batch: Any, logits_output: Any
) -> Callable[..., Any]:
    """Return `verify_tree_greedy_func` with a sample instead of each row's argmax. `eagle_sample`
    calls it after it has applied penalties, bias and grammar to the logits.
    """
    stock = utils.verify_tree_greedy_func

    def match(*args: Any, **kwargs: Any) -> Any:
        from sglang_c2t.srt.verify.sampling import sample_rows

        width, positions = int(verify_input.draft_token_num), verify_input.positions
        request = torch.arange(len(positions)) // width
        sampled = sample_rows(
            logits_output.next_token_logits, batch.sampling_info, request, positions
        )
        kwargs["target_predict"] = sampled.view(kwargs["target_predict"].shape)
        return stock(*args, **kwargs)

    return match


# -- differences between releases ----------------------------------------------------------


def _attention_fallback() -> tuple[ModuleType, str]:
    """Return the module global through which SGLang replaces a CPU's attention backend."""
    name = "_attention_backend_platform_fallbacks"
    try:  # imported with the module; in older SGLang when the step runs
        return importlib.import_module("sglang.srt.arg_groups.attention_hook"), name
    except ImportError:
        return importlib.import_module("sglang.srt.arg_groups.overrides"), name


def _backend_choices() -> ModuleType:
    """Return the module with SGLang's lists of attention backends."""
    try:
        return importlib.import_module("sglang.srt.arg_groups.choices")
    except ImportError:
        return importlib.import_module("sglang.srt.server_args")


def _made_backend(factory: Any, name: str, backend: Any) -> Any:
    """Return a backend as a method of SGLang's ``DraftBackendFactory`` must. Newer SGLang also
    needs its name, to mark the backend's steps.
    """
    return (
        (name, backend) if "stamps_children" in parameters_of(factory._create_backend) else backend
    )


def _supply_seed_hash(torch_hash: Callable[..., Any]) -> bool:
    """Make seeded sampling on a CPU use ``torch_hash(seed, positions, col_indices)``. Returns
    False, and does nothing, if SGLang's function supports a CPU op; older SGLang only has a Triton
    kernel.
    """
    from sglang.kernels.ops.sampling import murmur_hash

    if "murmur_hash32_cpu" in murmur_hash.murmur_hash32.__code__.co_names:
        return False
    from sglang.srt.layers import sampler

    for module in (murmur_hash, sampler):
        attach.write(module, murmur_hash32=torch_hash)
    return True

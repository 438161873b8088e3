"""One function per difference between SGLang's releases. ``seams.txt`` lists the differences; these
functions use what the installed release has.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt import versions
from sglang_c2t.srt.attach import swapped, wrap_global, write
from sglang_c2t.srt.probes import SeamError, module_exists, parameters_of
from sglang_c2t.srt.seams import ADAPTER_SEAMS, broken_seams

OVERRIDES = "sglang.srt.arg_groups.overrides"
CACHE_LOCS = "sglang.kernels.ops.speculative.cache_locs"
KV_CACHE = "sglang.srt.mem_cache.kv_cache_configurator"
DISAGGREGATION = "sglang.srt.speculative.eagle_disaggregation"


def resolved(server_args: Any) -> Any:
    """Return a view of the arguments with SGLang's own decisions applied."""
    overrides = importlib.import_module(OVERRIDES)
    view = getattr(overrides, "resolving_view", None) or overrides.resolved_view
    return view(server_args)


def argument(server_args: Any, name: str) -> Any:
    """Return the value of a server argument after SGLang's decisions. Newer SGLang keeps the typed
    value on the arguments and its choice separately. Raises :class:`SeamError` if this SGLang has
    no such argument: a refusal without its argument would let the combination through.
    """
    try:
        return getattr(resolved(server_args), name)
    except AttributeError as error:
        raise SeamError(
            f"SGLang {versions.installed()} has no server argument {name}; "
            "C2T checks it to refuse combinations it does not serve"
        ) from error


def require_readable(message: Any) -> None:
    """Raise ValueError unless a scheduler can decode this message. Newer SGLang encodes without a
    check, and its scheduler ends on a field of another type. The prompt, which is long and was read
    before, is left out. Older SGLang pickles.
    """
    io_struct = importlib.import_module("sglang.srt.managers.io_struct")
    if not hasattr(io_struct, "msgpack_encode"):
        return
    import msgspec

    skipped = {"input_ids", "input_embeds", "input_text", "mm_inputs", "token_type_ids"}
    unread = skipped.union({"time_stats"}).intersection(message.__struct_fields__)
    light = msgspec.structs.replace(message, **dict.fromkeys(unread))
    try:
        io_struct.msgpack_decode(io_struct.msgpack_encode(light))
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        # Messages are arrays: the error has a number instead of the field's name, and 0 is a tag.
        place = re.search(r"`\$\[(\d+)\]", str(error))
        field = message.__struct_fields__[int(place[1]) - 1] if place else "the request"
        raise ValueError(f"{field} cannot be read: {error}") from error


def draft_shape(server_args: Any) -> TreeShape:
    """Return the shape of a server's drafts."""
    return TreeShape(
        argument(server_args, "speculative_eagle_topk"),
        argument(server_args, "speculative_num_steps"),
        argument(server_args, "speculative_num_draft_tokens"),
    )


def default_shape(server_args: Any) -> TreeShape:
    """Return the shape that SGLang chooses if none of its flags is given."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(resolved(server_args))
    choose = importlib.import_module(
        "sglang.srt.arg_groups.speculative_hook"
    )._auto_choose_speculative_params
    num_steps, topk, num_draft_tokens = choose(server_args, config.hf_config.architectures[0])
    return TreeShape(topk, num_steps, num_draft_tokens)


def accepts_exactly(cfg: Any) -> bool:
    """Whether a draft is accepted with the target's own probability: thresholds of 1."""
    thresholds = "speculative_accept_threshold_single", "speculative_accept_threshold_acc"
    return all(argument(cfg, name) == 1.0 for name in thresholds)


def uses_dp_attention(cfg: Any) -> bool:
    """Whether attention is data parallel: by its size, in older SGLang by a flag."""
    if hasattr(cfg, "attn_dp_size") and cfg.attn_dp_size > 1:
        return True
    return bool(argument(cfg, "enable_dp_attention"))


def watermarks(cfg: Any) -> bool:
    """Whether sampling watermarks the output; false for an SGLang without watermarks."""
    try:
        importlib.import_module("sglang.srt.sampling.watermarking")
    except ImportError:
        return False
    return bool(argument(cfg, "watermark_config"))


def decode_graphs_enabled(cfg: Any) -> bool:
    """Whether resolved arguments enable CUDA graphs in decode."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return bool(cfg.cuda_graph_config.decode.backend != Backend.DISABLED)


def largest_graph(cfg: Any) -> int:
    """Return the requests in the largest CUDA graph of decode, from resolved arguments."""
    return int(cfg.cuda_graph_config.decode.max_bs or 0)


def decide(server_args: Any, **values: Any) -> None:
    """Set arguments during their resolution; newer SGLang keeps the typed values separately."""
    declare = getattr(importlib.import_module(OVERRIDES), "declare_resolution", None)
    if declare is None:
        write(server_args, **values)
    else:
        declare(server_args, "sglang_c2t", **values)


def is_hybrid(cfg: Any) -> bool:
    """Whether the target keeps recurrent state: :func:`has_recurrent_state` of its model."""
    from sglang.srt.configs.model_config import ModelConfig

    return has_recurrent_state(ModelConfig.from_server_args(cfg))


def dp_rank(runner: Any) -> int:
    """Return this replica's data-parallel rank; 0 if there is one replica."""
    runtime = importlib.import_module("sglang.srt.runtime_context")
    parallel = getattr(runner, "ps", None) or runtime.get_parallel()
    return parallel.dp_rank or 0


def has_own_draft(server_args: Any) -> bool:
    """Whether the draft's checkpoint differs from the target's."""
    path = argument(server_args, "speculative_draft_model_path")
    return path not in (None, argument(server_args, "model_path"))


def bundles_draft(cfg: Any) -> bool:
    """Whether SGLang takes draft layers from the target's own checkpoint (MTP). As a draft, the
    target's path then names another architecture.
    """
    from sglang.srt.configs.model_config import ModelConfig

    target, draft = (
        ModelConfig.from_server_args(cfg, is_draft_model=as_draft).hf_config.architectures
        for as_draft in (False, True)
    )
    return bool(target != draft)


def has_recurrent_state(model_config: Any) -> bool:
    """Whether the model is a Mamba / linear-attention hybrid, with state per verified row."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def verifies_adapters() -> bool:
    """Whether this SGLang supports LoRA with drafts, and packed rows there. 0.5.20 to 0.5.22
    support LoRA, but allocate for graphs under another name.
    """
    return not broken_seams(ADAPTER_SEAMS)


def lora_manager(target_runner: Any) -> Any:
    """Return the target's LoRA manager; ``None`` without one, and in older SGLang."""
    return getattr(target_runner, "lora_manager", None)


@contextmanager
def writing_rows(verify_input: Any, locs: Tensor) -> Iterator[None]:
    """Bind the rows of ``verify_input`` to ``locs`` [T] int64 in ``eagle_prepare_for_verify``.
    SGLang would bind ``draft_token_num`` rows of each request.
    """
    if hasattr(verify_input, "prepared_out_cache_loc"):
        # Otherwise the plan would bind the full window again.
        write(verify_input, prepared_out_cache_loc=locs, kv_loc_plan=None)
        yield
        return
    module, name = (
        importlib.import_module(CACHE_LOCS),
        "assign_extend_cache_locs_uniform_func",
    )
    bound = []

    def assign(**_uniform: Any) -> Tensor:
        bound.append(locs)
        return locs

    with ExitStack() as stack:
        stack.enter_context(swapped(module, name, assign))
        utils = importlib.import_module("sglang.srt.speculative.eagle_utils")
        if hasattr(utils, "_PREPARE_FOR_VERIFY_DEPS"):
            # It caches its first import: either the original function, or this one permanently.
            stack.enter_context(swapped(utils, "_PREPARE_FOR_VERIFY_DEPS", None))
        yield
    assert bound, f"SGLang bound the rows to verify without {module.__name__}.{name}"


@contextmanager
def rotating_rows(
    verify_input: Any, positions: Tensor, pack: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Give M-RoPE positions of packed rows to the forward batch made inside the block. SGLang
    computes them [3, B * N] for all rows' ``positions`` [B * N]; ``pack`` selects [3, T] for
    ``verify_input``. SGLang alone assumes equally many rows per request.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    if hasattr(verify_input, "prepared_mrope_positions"):
        write(verify_input, prepared_mrope_positions=None)  # it would use them unchanged
    compute = ForwardBatch.compute_spec_mrope_positions

    def compute_packed(forward_batch: Any, model_runner: Any, batch: Any) -> None:
        compute(forward_batch, model_runner, batch, seq_positions=positions)
        write(forward_batch, mrope_positions=pack(forward_batch.mrope_positions))

    with swapped(ForwardBatch, "compute_spec_mrope_positions", compute_packed):
        yield


def widen_request_table() -> None:
    """Make later rows of ``req_to_token`` hold all that SGLang reserves for a step. SGLang reserves
    twice what a step may write, but sizes rows for a tree only. Near the context limit the rest
    would overwrite another request's row.
    """
    wrap_global(
        KV_CACHE,
        "get_req_to_token_extra_context_len",
        _room_for_all_reserved,
    )


def _room_for_all_reserved(original: Callable[..., int], *args: Any) -> int:
    sizing = importlib.import_module("sglang.srt.mem_cache.allocation_sizing")
    return max(original(*args), sizing.get_alloc_reserve_per_decode(*args))


def disaggregates(server_args: Any) -> bool:
    """Whether prefill and decode run on separate servers."""
    return argument(server_args, "disaggregation_mode") not in (None, "null")


def only_prefills(server_args: Any) -> bool:
    """Whether another server decodes, so that this one verifies nothing."""
    return bool(argument(server_args, "disaggregation_mode") == "prefill")


def on_arrival(server_args: Any, arrive: Callable[[Any], None]) -> None:
    """Call ``arrive(batch)`` for requests whose prefill ran on another server."""
    if not disaggregates(server_args):
        return

    def build(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        draft_input = original(batch, *args, **kwargs)
        arrive(batch)
        return draft_input

    wrap_global(DISAGGREGATION, "build_eagle_disagg_draft_input", build)


@contextmanager
def before_replay(target_runner: Any, action: Callable[[], None]) -> Iterator[None]:
    """Call ``action()`` before each replay of the target's CUDA graphs inside the block."""
    graphs = target_runner.decode_cuda_graph_runner
    if graphs is None:
        yield
        return
    replay = graphs.backend.replay

    def announced(*args: Any, **kwargs: Any) -> Any:
        action()
        return replay(*args, **kwargs)

    with swapped(graphs.backend, "replay", announced):
        yield


def set_output_stride(result: Any, stride: int) -> None:
    """Set the number of tokens per request in ``result.next_token_ids``."""
    if hasattr(result, "speculative_output_stride"):
        write(result, speculative_output_stride=stride)
    else:
        write(result, speculative_num_draft_tokens=stride)


@contextmanager
def draft_extend_width(width: int) -> Iterator[None]:
    """Make CUDA graphs of draft extend captured inside the block take ``width`` rows per
    request.
    """
    with swapped(
        importlib.import_module("sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"),
        "resolve_num_tokens_per_req",
        lambda **_: width,
    ):
        yield


def target_hidden_width(draft_runner: Any) -> int:
    """Width of the target's hidden states for the draft: of several layers for EAGLE3."""
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    return int(get_draft_input_from_target_hidden_dim(draft_runner))


def request_slot(req: Any) -> int:
    """Return the row of a running request in SGLang's ``req_to_token`` table."""
    slot = req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx
    assert slot is not None, f"request {req.rid} has no slot"
    return int(slot)


def is_flashinfer(backend: Any) -> bool:
    """Whether an attention backend is FlashInfer's. By name: importing it needs FlashInfer."""
    return any(cls.__name__ == "FlashInferAttnBackend" for cls in type(backend).__mro__)


def is_flashinfer_mla(backend: Any) -> bool:
    """Whether an attention backend is FlashInfer's for MLA."""
    return any(cls.__name__ == "FlashInferMLAAttnBackend" for cls in type(backend).__mro__)


def translates_slots(backend: Any) -> bool:
    """Whether an attention backend reads other key slots than the request table holds."""
    translator = getattr(backend, "kv_index_translator", None)
    if translator is None:
        return False
    if hasattr(translator, "reads_are_translated"):
        return bool(translator.reads_are_translated)
    return bool(translator.is_translating)


def flashinfer_counts_rows() -> bool:
    """Whether FlashInfer's planner sizes partial outputs by rows, from its source. Older ones use
    (row, query head of the group) pairs, which is never less.
    """
    import flashinfer

    source = Path(flashinfer.__file__).parent / "data/include/flashinfer/attention/scheduler.cuh"
    return source.is_file() and "max_partial_rows" in source.read_text()


def gathers_rows(server_args: Any) -> bool:
    """Whether ranks exchange rows inside the model (MoE all-to-all, smaller dense groups). SGLang
    then agrees on row counts, as multiples of the ranks, before the forward.
    """
    from sglang.srt.utils.common import require_gathered_buffer

    gathers: Any = require_gathered_buffer
    return bool(gathers(server_args) if "server_args" in parameters_of(gathers) else gathers())


def reads_packed_rows(backend: Any) -> bool:
    """Whether an attention backend claims to read a ``RaggedVerifyLayout``. Ours do, and SGLang's
    that read DSPARK's layouts do for chains.
    """
    if getattr(backend, "supports_ragged_verify_eager", False):
        return True
    chains = getattr(backend, "topk", None) in (None, 0, 1)
    return bool(getattr(backend, "supports_ragged_verify_graph", False)) and chains


def without_sampling_masks(info: Any) -> Any:
    """Make the sampler omit the support masks per request; returns ``info``."""
    if hasattr(info, "sampling_mask_batch_indices"):
        write(info, sampling_mask_batch_indices=None)
    write(info, return_sampling_masks=None)  # read by older SGLang
    return info


def plan_every_replay(graph_runner: Any) -> None:
    """Make SGLang prepare every replay of a decode graph on the host. Newer SGLang may record the
    preparation in a graph, which would freeze our attention's plans.
    """
    if module_exists("sglang.srt.model_executor.runner.metadata_glue_graph"):
        write(graph_runner, _metadata_glue=None)

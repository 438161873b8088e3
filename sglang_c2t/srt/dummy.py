"""Batches of dummy requests, as SGLang's scheduler passes them to a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
from torch import Tensor

from sglang_c2t.srt import attach
from sglang_c2t.srt.data_parallel import peers

# B requests


def dummy_batch(worker: Any, slots: list[int], lengths: list[int]) -> ScheduleBatch:
    """Return a greedy batch of B requests, ready to draft.

    Args:
        worker: SGLang's speculative worker.
        slots: [B] rows of SGLang's request table.
        lengths: [B] tokens of context.
    """
    model, requests = worker.target_worker.model_runner.model_config, len(slots)

    def full(value: int, dtype: Any, *columns: int) -> Tensor:
        return torch.full((requests, *columns), value, dtype=dtype, device=worker.device)

    def of(values: list[int], dtype: Any, device: Any = worker.device) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    hidden_size, dtype = get_draft_recurrent_hidden_state_spec(worker.draft_worker.draft_runner)
    drafts = EagleDraftInput(
        topk_p=full(1, torch.float32, worker.topk),
        topk_index=full(0, torch.int64, worker.topk),
        hidden_states=None if hidden_size is None else full(0, dtype, hidden_size),
        bonus_tokens=full(0, torch.int32),
    )
    no_cache: Any = None
    batch = ScheduleBatch.init_new(
        reqs=[],
        req_to_token_pool=worker.req_to_token_pool,
        token_to_kv_pool_allocator=worker.token_to_kv_pool_allocator,
        tree_cache=no_cache,
        model_config=model,
        enable_overlap=False,
        spec_algorithm=worker.speculative_algorithm,
    )
    attach.write(
        batch,
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=of(slots, torch.int64),
        seq_lens=of(lengths, torch.int64),
        seq_lens_cpu=of(lengths, torch.int64, "cpu"),
        seq_lens_sum=sum(lengths),
        orig_seq_lens=of(lengths, torch.int32),
        multimodal_inputs=[None] * requests,
        sampling_info=_greedy(full, model.vocab_size, worker.device),
        spec_info=drafts,
    )
    if (together := peers()) is not None:  # all of them have such a batch
        attach.write(
            batch,
            global_num_tokens=[requests] * together.ranks,
            global_num_tokens_for_logprob=[requests] * together.ranks,
            can_run_decode_cuda_graph=True,
            can_run_dp_draft_cuda_graph=True,
        )
    return batch


def _greedy(full: Callable[..., Tensor], vocab_size: int, device: Any) -> SamplingBatchInfo:
    """Return sampling parameters for temperature 0; ``full`` makes a tensor per request."""
    return SamplingBatchInfo(
        temperatures=full(1, torch.float32, 1),
        top_ps=full(1, torch.float32),
        top_ks=full(1, torch.int32),
        min_ps=full(0, torch.float32),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=vocab_size,
        device=device,
    )

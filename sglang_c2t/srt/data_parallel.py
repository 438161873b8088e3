"""Attention that is data parallel: ranks serve requests of their own, and forward together.

Behind its attention a model gathers the rows of all ranks, and so may its draft model. So ranks
make the same forwards in the same order, those that serve nobody as well, and each knows how many
rows the others bring. SGLang agrees on requests, once a step; what follows from drafts is agreed
here: how many layers are drafted, and how many rows are verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.common import require_attn_tp_gather, require_mlp_tp_gather

from sglang_c2t.srt import attach


class Peers:
    """The ranks that forward together, of which A have requests of their own."""

    def __init__(self, parallel: Any) -> None:
        self.ranks: int = parallel.attn_dp_size
        """A."""
        self.rows_divide_by: int = parallel.attn_tp_size
        """What the rows of a forward are a multiple of: the ranks that share requests."""
        self._group = parallel.tp_group.cpu_group

    def of_all(self, *mine: int) -> list[list[int]]:
        """These numbers of each of the A ranks. All call it, and wait for the last."""
        told = torch.tensor(mine, dtype=torch.int64)
        everyones = [torch.empty_like(told) for _ in range(self._group.size())]
        torch.distributed.all_gather(everyones, told, group=self._group)
        # Those that share requests stand behind each other, and say the same.
        return [told.tolist() for told in everyones[:: len(everyones) // self.ranks]]

    def layers(self, mine: int, requests: int, *, all_of_them: bool = False) -> int:
        """Layers that are drafted, where this rank would draft ``mine`` for its ``requests``: what
        the rank with most requests would, or what one must that wants ``all_of_them``.
        """
        return max(self.of_all(int(all_of_them), requests, mine))[-1]


def peers() -> Peers | None:
    """The ranks that this one forwards with; ``None`` where attention is not data parallel."""
    parallel = get_parallel()
    return Peers(parallel) if parallel.attn_dp_size > 1 else None


def agrees_on_rows() -> bool:
    """Whether ranks forward together, are told the rows of each, and gather them behind attention:
    not where experts dispatch rows by themselves, or dense layers have groups of their own.
    """
    if peers() is None or not get_moe_a2a_backend().is_none():
        return False
    return bool(require_mlp_tp_gather()) and not require_attn_tp_gather()


class PackedForwardBatch(ForwardBatch):
    """A verification of packed rows beside those of other ranks."""

    def prepare_mlp_sync_batch(self, model_runner: Any) -> None:
        """Pad rows, as those of prompts: SGLang would add whole requests of N rows each."""
        with attach.swapped(self, "forward_mode", ForwardMode.EXTEND):
            super().prepare_mlp_sync_batch(model_runner)


@contextmanager
def telling_rows(batch: Any, packed: Any, rows: Sequence[int] | None) -> Iterator[None]:
    """The forward batch that is made of ``batch`` inside the block knows how many ``rows`` [A] the
    verify input of each rank has, this one's being ``packed``; ``None``: nobody asks.
    """
    if rows is None:
        yield
        return
    width = packed.num_tokens_per_req
    with (
        attach.swapped(batch, "global_num_tokens", list(rows)),
        attach.swapped(batch, "global_num_tokens_for_logprob", list(rows)),
    ):
        # SGLang multiplies requests by these.
        attach.write(packed, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
        try:
            yield
        finally:
            attach.write(packed, num_tokens_per_req=width, num_tokens_for_logprob_per_req=width)


@contextmanager
def idle_rank_with_dummy_request(batch: Any) -> Iterator[None]:
    """An idle ``batch`` has one request inside the block, in the padding row of SGLang's table.

    A CUDA graph replays at least one request, and attention plans at least one.
    """
    device = batch.device
    one = torch.ones(1, dtype=torch.int64)
    mine: dict[str, Any] = {
        "forward_mode": ForwardMode.DECODE,
        "req_pool_indices": torch.zeros(1, dtype=torch.int64, device=device),
        "seq_lens": one.to(device),
        "seq_lens_cpu": one,
        "seq_lens_sum": 1,
        "orig_seq_lens": one.to(device, torch.int32),
        "multimodal_inputs": [None],
    }
    kept = {name: getattr(batch, name) for name in mine}
    attach.write(batch, **mine)
    try:
        yield
    finally:
        attach.write(batch, **kept)

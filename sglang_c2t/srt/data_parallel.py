"""Data-parallel attention: ranks have separate requests and forward together.

After its attention a model gathers the rows of all ranks, and so may its draft model. So all ranks,
idle ones included, make the same forwards in the same order, and each knows the others' row counts.
SGLang agrees on requests once a step. This module agrees on draft layers and verified rows.
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
    """The ranks that forward together, of which A have separate requests."""

    def __init__(self, parallel: Any) -> None:
        self.ranks: int = parallel.attn_dp_size
        """A."""
        self.rows_divide_by: int = parallel.attn_tp_size
        """Divisor of a forward's row count: the number of ranks that share requests."""
        self._group = parallel.tp_group.cpu_group

    def of_all(self, *mine: int) -> list[list[int]]:
        """Return these numbers of each of the A ranks. All ranks call it and wait for the last."""
        told = torch.tensor(mine, dtype=torch.int64)
        everyones = [torch.empty_like(told) for _ in range(self._group.size())]
        torch.distributed.all_gather(everyones, told, group=self._group)
        # Ranks that share requests are adjacent and have the same numbers.
        return [told.tolist() for told in everyones[:: len(everyones) // self.ranks]]

    def layers(self, mine: int, requests: int, *, all_of_them: bool = False) -> int:
        """Return the layers to draft on all ranks: those of the rank with most requests. ``mine``
        are this rank's for its ``requests``. A rank with ``all_of_them`` overrides the others.
        """
        return max(self.of_all(int(all_of_them), requests, mine))[-1]


def peers() -> Peers | None:
    """Return the ranks that forward with this one; ``None`` without data-parallel attention."""
    parallel = get_parallel()
    return Peers(parallel) if parallel.attn_dp_size > 1 else None


def agrees_on_rows() -> bool:
    """Whether ranks forward together, know each other's rows, and gather them after attention. They
    do not if experts dispatch rows themselves, or dense layers have separate groups.
    """
    if peers() is None or not get_moe_a2a_backend().is_none():
        return False
    return bool(require_mlp_tp_gather()) and not require_attn_tp_gather()


class PackedForwardBatch(ForwardBatch):
    """A verification of packed rows, together with those of other ranks."""

    def prepare_mlp_sync_batch(self, model_runner: Any) -> None:
        """Pad rows as for prompts: SGLang would add full requests of N rows each."""
        with attach.swapped(self, "forward_mode", ForwardMode.EXTEND):
            super().prepare_mlp_sync_batch(model_runner)


@contextmanager
def telling_rows(batch: Any, packed: Any, rows: Sequence[int] | None) -> Iterator[None]:
    """Put the ``rows`` [A] of all ranks into the forward batch made of ``batch`` inside the block.
    ``packed`` is this rank's verify input. With ``None`` it does nothing.
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
    """Give an idle ``batch`` one request inside the block, in the padding row of SGLang's table. A
    CUDA graph replays at least one request, and attention plans at least one.
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

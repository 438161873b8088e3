"""LoRA adapters of packed rows.

SGLang's LoRA backends take a verification for equally many rows of each request, and CUDA graphs
for as many as they were captured with. A verification of ours is therefore told to them as a
decode step: every row is a request with one token, and has the adapter of whom it belongs to. That
every backend serves, whatever the rows, and in graphs of T rows it is what they are made for.
"""

from __future__ import annotations

import copy
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_c2t.srt import attach
from sglang_c2t.srt.verify.packed import packing_of

# B requests, R rows that are verified, T >= R rows of the forward


def tell_rows(manager: Any) -> None:
    """Have the target's LoRA manager prepare verifications row by row."""
    prepare, allocate = manager.prepare_lora_batch, manager.init_decode_cuda_graph_batch_info

    def prepare_rows(forward_batch: Any) -> None:
        verifies = forward_batch.forward_mode.is_target_verify()
        prepare(_as_decode_step(forward_batch) if verifies else forward_batch)

    def allocate_rows(max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        allocate(max_bs_in_cuda_graph * num_tokens_per_req, num_tokens_per_req=1)

    attach.write(
        manager, prepare_lora_batch=prepare_rows, init_decode_cuda_graph_batch_info=allocate_rows
    )


def tell_requests(manager: Any) -> None:
    """Undo :func:`tell_rows`."""
    for name in ("prepare_lora_batch", "init_decode_cuda_graph_batch_info"):
        delattr(manager, name)


def _as_decode_step(forward_batch: Any) -> Any:
    """A copy of a verify forward, of T requests that decode."""
    adapters = adapters_of_rows(forward_batch)
    rows = copy.copy(forward_batch)
    attach.write(rows, forward_mode=ForwardMode.DECODE, batch_size=len(adapters), lora_ids=adapters)
    return rows


def adapters_of_rows(forward_batch: Any) -> list[str | None]:
    """[T]: the adapter of each row of a verify forward, ``None`` without one.

    Waits for the sizes of requests only where they have different adapters.
    """
    tokens = len(forward_batch.input_ids)
    adapters = forward_batch.lora_ids or [None]  # of a batch for nobody there are none
    if len(set(adapters)) > 1:
        packing = packing_of(forward_batch)
        width = forward_batch.spec_info.draft_token_num
        sizes = [width] * len(adapters) if packing is None else packing.host_rows.tolist()
        adapters = [a for a, size in zip(adapters, sizes, strict=True) for _ in range(size)]
    # Padding is nobody's: with the last row's adapter it takes no other into the batch.
    return adapters[:tokens] + adapters[-1:] * (tokens - len(adapters))

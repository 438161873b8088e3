"""LoRA adapters of packed rows.

SGLang's LoRA backends assume equally many rows per request in a verification, and CUDA graphs the
number at capture. This module presents a verification as a decode step: each row becomes a request
with one token and its request's adapter. Every backend supports that for any number of rows, and
graphs of T rows are captured for it.
"""

from __future__ import annotations

import copy
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_c2t.srt import attach
from sglang_c2t.srt.verify.packed import packing_of

# B requests, R rows that are verified, T >= R rows of the forward


def use_per_row_lora(manager: Any) -> None:
    """Make the target's LoRA manager prepare verifications row by row."""
    prepare, allocate = manager.prepare_lora_batch, manager.init_decode_cuda_graph_batch_info

    def prepare_rows(forward_batch: Any) -> None:
        verifies = forward_batch.forward_mode.is_target_verify()
        prepare(_as_decode_step(forward_batch) if verifies else forward_batch)

    def allocate_rows(max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        allocate(max_bs_in_cuda_graph * num_tokens_per_req, num_tokens_per_req=1)

    attach.write(
        manager, prepare_lora_batch=prepare_rows, init_decode_cuda_graph_batch_info=allocate_rows
    )


def restore_per_request_lora(manager: Any) -> None:
    """Undo :func:`use_per_row_lora`."""
    for name in ("prepare_lora_batch", "init_decode_cuda_graph_batch_info"):
        delattr(manager, name)


def _as_decode_step(forward_batch: Any) -> Any:
    """Return a copy of a verify forward as T requests that decode."""
    adapters = adapters_of_rows(forward_batch)
    rows = copy.copy(forward_batch)
    attach.write(rows, forward_mode=ForwardMode.DECODE, batch_size=len(adapters), lora_ids=adapters)
    return rows


def adapters_of_rows(forward_batch: Any) -> list[str | None]:
    """[T]: the adapter of each row of a verify forward, ``None`` without one. It waits for the
    requests' sizes only if they have different adapters.
    """
    tokens = len(forward_batch.input_ids)
    adapters = forward_batch.lora_ids or [None]  # a dummy batch has none
    if len(set(adapters)) > 1:
        packing = packing_of(forward_batch)
        width = forward_batch.spec_info.draft_token_num
        sizes = [width] * len(adapters) if packing is None else packing.host_rows.tolist()
        adapters = [a for a, size in zip(adapters, sizes, strict=True) for _ in range(size)]
    # Padding rows get the last row's adapter, which adds no other to the batch.
    return adapters[:tokens] + adapters[-1:] * (tokens - len(adapters))

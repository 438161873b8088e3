"""Writes after a verification: bonus tokens, accepted slots, rotated prompt tokens. Sources:
``sgl_kernel.{fill_bonus_tokens,fill_accept_out_cache_loc,rotate_input_ids}_cpu`` (Triton twins in
SGLang's ``kernels/ops/speculative/eagle.py`` and ``multi_layer_eagle.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_c2t.cpu.cache_locs import range_cells


def fill_bonus_tokens(
    accept_tokens: Tensor,  # [B*S] accepted tokens, S per request
    accept_lens: Tensor,  # [B] accepted tokens per request, bonus included
    bonus_tokens: Tensor,  # [B] written in place
    accept_stride: int,
) -> None:
    """Write the last accepted token of every request (``fill_bonus_tokens_cpu``)."""
    first = torch.arange(accept_lens.shape[0], device=accept_lens.device) * accept_stride
    last = first + accept_lens.to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accepted_locs(
    accept_index: Tensor,  # [B, S] or flat, verify row or -1
    out_cache_loc: Tensor,  # [rows] slot of every verify row
    accept_out_cache_loc: Tensor,  # written in place from the front
) -> None:
    """Write slots of the accepted rows, packed in order (``fill_accept_out_cache_loc_cpu``)."""
    rows = accept_index.flatten()
    slots = out_cache_loc[rows[rows >= 0].to(torch.int64)]
    accept_out_cache_loc[: slots.shape[0]] = slots.to(accept_out_cache_loc.dtype)


def rotate_input_ids(
    input_ids: Tensor,  # [T] written in place
    extend_start_loc: Tensor,  # [B] first row of every request
    extend_seq_lens: Tensor,  # [B]
    topk_index: Tensor,  # [B] or [B, 1] the token that follows
    select_index: Tensor | None = None,  # [B] row that takes the new token; default: the last
) -> None:
    """Shift every request's tokens left by one, append the next one (``rotate_input_ids_cpu``).
    Tokens ``[1, 2, 3 | 4]`` with new tokens ``[9, 8]`` become ``[2, 3, 9 | 8]``.
    """
    lengths = extend_seq_lens.to(torch.int64)
    start = extend_start_loc.to(torch.int64)
    request, row = range_cells(start, start + lengths)
    last = start + lengths - 1
    inner = row < last[request]
    input_ids[row[inner]] = input_ids[row[inner] + 1]
    live = lengths > 0
    into = last if select_index is None else select_index.to(torch.int64)
    input_ids[into[live]] = topk_index.flatten()[live].to(input_ids.dtype)

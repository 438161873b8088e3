"""Copies between ``req_to_token`` rows and packed lists of KV slots.

Half-open ranges of one request's row, L = committed length:

    [0, L)            committed tokens
    [L, L + K*D)      draft slots (draft_locs)
    [L, L + N)        verify and draft-extend slots (gather_ranges with start=L, end=L+N)

Sources: ``assign_draft_cache_locs_contiguous_cpu``, ``assign_extend_cache_locs_cpu`` and
``assign_req_to_token_pool_cpu`` of ``sgl_kernel`` (Triton twins in SGLang's
``kernels/ops/speculative/cache_locs.py`` and ``mem_cache/allocation.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor


def range_cells(
    start: Tensor,  # [B]
    end: Tensor,  # [B]
) -> tuple[Tensor, Tensor]:
    """Return ``(request [T], column [T])`` of all cells of B ranges, packed; T = sum(end - start).
    ``start [3, 0], end [5, 1]`` gives requests ``[0, 0, 1]`` and columns ``[3, 4, 0]``.
    """
    start, end = start.to(torch.int64), end.to(torch.int64)
    lengths = end - start
    request = torch.repeat_interleave(lengths)  # B numbers, each lengths[b] times
    first_cell = lengths.cumsum(0) - lengths
    cell = torch.arange(request.shape[0], device=start.device)
    return request, start[request] + cell - first_cell[request]


def draft_locs(
    req_pool_indices: Tensor,  # [B]
    req_to_token: Tensor,  # [R, pool_len] int32
    seq_lens: Tensor,  # [B]
    out_cache_loc: Tensor,  # [B*K*D] int64, written in place
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Copy the K*D slots after each committed prefix
    (``assign_draft_cache_locs_contiguous_cpu``).
    """
    offset = torch.arange(topk * num_steps, device=seq_lens.device)
    column = seq_lens.to(torch.int64).unsqueeze(1) + offset
    rows = req_to_token[req_pool_indices.to(torch.int64).unsqueeze(1), column]
    out_cache_loc.copy_(rows.flatten())


def gather_ranges(
    req_pool_indices: Tensor,  # [B]
    req_to_token: Tensor,  # [R, pool_len] int32
    start_offset: Tensor,  # [B]
    end_offset: Tensor,  # [B]
    out_cache_loc: Tensor,  # [>= T] int64, the first T entries written in place
    pool_len: int,
) -> None:
    """Copy slots of columns [start, end) of every row, packed
    (``assign_extend_cache_locs_cpu``).
    """
    request, column = range_cells(start_offset, end_offset)
    slots = req_to_token[req_pool_indices.to(torch.int64)[request], column]
    out_cache_loc[: slots.shape[0]] = slots.to(out_cache_loc.dtype)


def scatter_ranges(
    req_pool_indices: Tensor,  # [B]
    req_to_token: Tensor,  # [R, pool_len] int32, written in place
    start_offset: Tensor,  # [B]
    end_offset: Tensor,  # [B]
    out_cache_loc: Tensor,  # [>= T] slots, packed
    pool_len: int,
) -> None:
    """Copy packed slots to their rows; inverse of `gather_ranges`
    (``assign_req_to_token_pool_cpu``).
    """
    request, column = range_cells(start_offset, end_offset)
    slots = out_cache_loc[: request.shape[0]].to(req_to_token.dtype)
    req_to_token[req_pool_indices.to(torch.int64)[request], column] = slots

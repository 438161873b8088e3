"""Moves KV rows inside every layer's cache, addressed by SGLang's pointers. Source:
``sgl_kernel.copy_all_layer_kv_cache_cpu`` (Triton twin in SGLang's
``kernels/ops/kvcache/cache_move.py``).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def rows_at(data_ptr: int, num_rows: int, row_bytes: int) -> Tensor:
    """[num_rows, row_bytes] uint8 view of memory that the caller owns and keeps alive."""
    buffer = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(data_ptr)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(num_rows, row_bytes)


def copy_all_layers(
    data_ptrs: Tensor,  # [2*layers] uint64, address of every K and V buffer
    strides: Tensor,  # [2*layers] int64, bytes of one slot
    tgt_loc: Tensor,  # [n] slots
    src_loc: Tensor,  # [n] slots
) -> None:
    """Copy ``buffer[tgt] = buffer[src]`` in each layer; reads finish before the first write."""
    if tgt_loc.numel() == 0:
        return
    tgt, src = tgt_loc.to(torch.int64), src_loc.to(torch.int64)
    num_rows = int(torch.maximum(tgt.max(), src.max())) + 1
    for data_ptr, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = rows_at(data_ptr, num_rows, row_bytes)
        rows.index_copy_(0, tgt, rows.index_select(0, src))

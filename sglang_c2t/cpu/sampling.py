"""Random draws that depend on (seed, position, column) only.

Verification samples one token per verified row and then matches the drafts against it
(`sglang_c2t.cpu.tree_verify`). The emitted tokens are the sampled ones, for any drafts, so the
output follows the target exactly. A row's draw depends on its request's seed and position, so it
equals the draw of decoding without speculation.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def _mix(state: Tensor, key: Tensor) -> Tensor:
    """One murmur3 block; all values are uint32 held in int64."""
    key = (key * 0xCC9E2D51) & _LOW
    key = ((key << 15) | (key >> 17)) & _LOW
    key = (key * 0x1B873593) & _LOW
    state = state ^ key
    state = ((state << 13) | (state >> 19)) & _LOW
    return (state * 5 + 0xE6546B64) & _LOW


def _finish(state: Tensor) -> Tensor:
    """The murmur3 finaliser over a 16-byte message."""
    state = state ^ 16
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _LOW
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _LOW
    return state ^ (state >> 16)


def murmur_hash32(
    seed: Tensor,  # [n] uint64
    positions: Tensor,  # [n] integer, the low 32 bits count
    col_indices: Tensor,  # [m] integer, the low 32 bits count
) -> Tensor:
    """[n, m] uint32 hash of (seed, position, column): ``sgl_kernel.murmur_hash32_cpu``. Same bits
    as the Triton kernel in SGLang's ``kernels/ops/sampling/murmur_hash.py``. int64 products wrap,
    and the low 32 bits of a wrapped product are right.
    """
    bits = seed.view(torch.int64)
    state = _mix(torch.zeros_like(bits), bits & _LOW)
    state = _mix(state, (bits >> 32) & _LOW)
    state = _mix(state, positions.to(torch.int64) & _LOW)
    hashed = _finish(_mix(state.unsqueeze(1), (col_indices.to(torch.int64) & _LOW).unsqueeze(0)))
    return hashed.to(torch.uint32)

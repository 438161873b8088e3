"""How FlashInfer's fa2 prefill cuts a ragged batch into thread blocks, inside CUDA graphs.

Our own words for ``PrefillSplitQOKVIndptr`` and ``PrefillPlanImpl`` of FlashInfer's
``include/flashinfer/attention/scheduler.cuh``, 0.6.15 and 0.7.2, at page size 1 without sliding
window. They run on the host before every replay; the graph has frozen the slots S, the tier T
and every buffer by then. Agrees with the header, compiled, on random batches.

Legend: S slots, T rows at most, R rows of this batch, g query heads per kv head. A *packed*
row is a (row, query head of the group) pair, so that a request of n rows has n * g.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MIN_KV_CHUNK = 128


@dataclass(frozen=True)
class Shape:
    """Constants of a captured graph, without the rows: model, GPU, slots and tier."""

    slots: int
    num_tokens: int
    kv_heads: int
    group: int
    head_dim: int = 128
    num_sm: int = 132

    @property
    def blocks_if_split(self) -> int:
        """Two thread blocks per SM, shared by the kv heads."""
        return 2 * self.num_sm // self.kv_heads

    @property
    def tile(self) -> int:
        """Packed rows of one thread block: frozen, since only S and T enter."""
        longest = (self.num_tokens - self.slots + 1) % 2**32  # unsigned: huge if S > T + 1
        longest *= self.group
        if longest > 64 and self.head_dim < 256:
            return 128
        return 64 if longest > 16 else 16

    @property
    def grid(self) -> int:
        """Thread blocks per kv head of every replay ("padded batch size")."""
        tiles = -(-self.num_tokens * self.group // self.tile) + self.slots - 1
        return max(self.blocks_if_split, tiles)

    @property
    def partial_rows(self) -> int:
        """Rows of the buffer for partial outputs in 0.7.2; 0.6.15 has ``group`` times as many."""
        return -(-self.grid * self.tile // self.group)


@dataclass(frozen=True)
class Plan:
    """Work lists of one replay: entry i belongs to thread block i, later blocks return."""

    kv_chunk: int
    chunks: Ints
    """[S] chunks each request's keys are cut into."""

    request_indices: Ints
    qo_tile_indices: Ints
    kv_tile_indices: Ints
    o_indptr: Ints
    """[S + 1] first partial output of each request."""

    merge_indptr: Ints
    """[R + 1] first partial output of each row."""


def ceil_div(dividend: Ints, divisor: int) -> Ints:
    return -(-dividend // divisor)


def plan(shape: Shape, rows: Ints, keys: Ints) -> Plan:
    """The plan of S slots with ``rows`` [S] query rows and ``keys`` [S] keys each."""
    tiles = ceil_div(rows * shape.group, shape.tile)
    keys = np.maximum(keys, 1)
    low, high = MIN_KV_CHUNK, max(int(keys.max()), 1)
    while low < high:  # the shortest chunk whose blocks still fit the GPU
        middle = (low + high) // 2
        if int((tiles * ceil_div(keys, middle)).sum()) > shape.blocks_if_split:
            low = middle + 1
        else:
            high = middle
    chunks = ceil_div(keys, low)

    blocks = tiles * chunks  # [S]
    request = np.repeat(np.arange(shape.slots), blocks)
    within = np.arange(len(request)) - (blocks.cumsum() - blocks)[request]
    return Plan(
        kv_chunk=low,
        chunks=chunks,
        request_indices=request,
        qo_tile_indices=within // chunks[request],
        kv_tile_indices=within % chunks[request],
        o_indptr=np.concatenate(([0], (rows * chunks).cumsum())),
        merge_indptr=np.concatenate(([0], np.repeat(chunks, rows).cumsum())),
    )

"""Index tables of one packed forward, in one launch.

A verification forwards the first ``num_rows[b]`` of each request's N strided rows, one request
after the other. It pads them to T rows and S >= B slots, those of a CUDA graph. Attention needs
every row in some slot, so the slots after the requests share the padding::

    num_rows [3, 1], N = 4, T = 6, S = 3     rows 0 1 2 4 8 8     slots of 3, 1, 2 rows

Static shapes, no host reads; 44 T + 12 B W + 16 S bytes, so the cost is the launch. Kernel and twin
as in :mod:`sglang_c2t.kernels.rows`.

Legend: B requests, N rows a request, T packed rows (at least those verified), S slots, W places.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import (
    aligned_tables,
    block_of,
    block_of_batch,
    rows_before,
    runs_triton,
)


class Layout(NamedTuple):
    """Tables of the rows, of the slots, and of the KV slots that requests write."""

    input_ids: Tensor
    """[T] int64; padding has 0, as in the next two: SGLang's dummy KV slot."""

    positions: Tensor
    """[T] int64."""

    out_cache_loc: Tensor
    """[T] int64: KV slots."""

    rows: Tensor
    """[T] int64: number of the strided row, ascending; B * N on padding."""

    request: Tensor
    """[T] int64: request of the row; 0 on padding, so that tables [B] can be gathered."""

    window: Tensor
    """[B, W] int64: KV slots after each committed prefix; 0 beyond the context limit, where
    ``req_to_token`` ends."""

    slot_rows: Tensor
    """[S] int32, T in all: rows of the requests, then of the slots after them, which share the
    padding equally. Without such slots the last request has the padding.
    """

    row_starts: Tensor
    """[S + 1] int32: first row of each slot, and T."""

    slot_keys: Tensor
    """[S] int32: a slot's rows and the keys before them; padding has one key before it."""

    key_starts: Tensor
    """[S + 1] int32: prefix sums of ``slot_keys``."""


def lay_out(
    num_rows: Tensor,
    draft_token: Tensor,
    positions: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *,
    tokens: int,
    slots: int,
    places: int,
) -> Layout:
    """Compute the tables of one packed forward.

    Row j of request b writes KV slot ``req_to_token[req_pool_indices[b], seq_lens[b] + j]``.

    Args:
        num_rows: [B] int in [0, N], T or less in all.
        draft_token: [B * N] int64.
        positions: [B * N] int64.
        req_to_token: [pool, context] int32, the last dimension contiguous. Rows beyond it get slot
        0.
        req_pool_indices: [B] int.
        seq_lens: [B] int, the root not counted.
        tokens: T.
        slots: S.
        places: W >= N.
    """
    tables = num_rows, draft_token, positions, req_to_token, req_pool_indices, seq_lens
    if not runs_triton(num_rows):
        return lay_out_numpy(*tables, tokens=tokens, slots=slots, places=places)
    batch = len(num_rows)
    width = draft_token.numel() // max(batch, 1)
    window = req_to_token.new_empty((batch, places), dtype=torch.int64)
    of_rows, rows = aligned_tables(window, 5, 1, tokens)
    of_slots, sizes = aligned_tables(req_to_token, 4, 1, slots + 1)
    _lay_out_kernel[(batch + 1,)](
        *tables, of_rows, of_slots, window, batch, width, tokens, slots, places,
        of_rows.stride(0), of_slots.stride(0), req_to_token.stride(0), req_to_token.shape[1],
        BLOCK_S=block_of_batch(slots), BLOCK_N=block_of(places),
    )  # fmt: skip
    ids, at, locs, strided, request = (table[0] for table in rows)
    each, starts, keys, key_starts = (table[0] for table in sizes)
    return Layout(
        ids, at, locs, strided, request, window, each[:slots], starts, keys[:slots], key_starts
    )


@triton.jit(do_not_specialize=["batch", "tokens", "slots", "rows_apart", "slots_apart"])
def _lay_out_kernel(
    num_rows, draft_token, positions, req_to_token, req_pool_indices, seq_lens,
    of_rows, of_slots, window, batch, width, tokens, slots, places,
    rows_apart, slots_apart, pool_stride, pool_width,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program per request, and a last one for the padding and the slots.
    this = tl.program_id(0)
    first = rows_before(num_rows, this, batch, BLOCK_S)
    lane = tl.arange(0, BLOCK_N)
    if this < batch:
        place = of_rows + first + lane
        live = (lane < tl.load(num_rows + this)) & (first + lane < tokens)
        row = this.to(tl.int64) * width + lane
        pool = req_to_token + tl.load(req_pool_indices + this).to(tl.int64) * pool_stride
        behind = tl.load(seq_lens + this) + lane
        # After the row, another request's row begins.
        there = (behind < pool_width) & (lane < places)
        loc = tl.load(pool + behind, mask=there, other=0).to(tl.int64)
        tl.store(place, tl.load(draft_token + row, mask=live), mask=live)
        tl.store(place + rows_apart, tl.load(positions + row, mask=live), mask=live)
        tl.store(place + 2 * rows_apart, loc, mask=live)
        tl.store(place + 3 * rows_apart, row, mask=live)
        tl.store(place + 4 * rows_apart, tl.zeros_like(row) + this, mask=live)
        tl.store(window + this.to(tl.int64) * places + lane, loc, mask=lane < places)
    else:
        for start in range(first, tokens, BLOCK_N):
            place = of_rows + start + lane
            padding = start + lane < tokens
            for table in range(5):
                fill = tl.where(table == 3, this.to(tl.int64) * width, 0)
                tl.store(place + table * rows_apart, fill, mask=padding)
        slot = tl.arange(0, BLOCK_S)
        real, inside = slot < batch, slot < slots
        left = (tokens - first).to(tl.int32)
        spare = slots - batch
        share = left // tl.maximum(spare, 1)
        one_more = (slot - batch < left - share * spare).to(tl.int32)
        each = tl.load(num_rows + slot, mask=real, other=0).to(tl.int32)
        each += tl.where((spare == 0) & (slot == batch - 1), left, 0)
        each = tl.where(real, each, share + one_more)
        before = tl.load(seq_lens + slot, mask=real, other=1).to(tl.int32)
        keys = each + before
        tl.store(of_slots + slot, each, mask=inside)
        tl.store(of_slots + slots_apart, 0)
        tl.store(of_slots + slots_apart + 1 + slot, tl.cumsum(each, 0), mask=inside)
        tl.store(of_slots + 2 * slots_apart + slot, keys, mask=inside)
        tl.store(of_slots + 3 * slots_apart, 0)
        tl.store(of_slots + 3 * slots_apart + 1 + slot, tl.cumsum(keys, 0), mask=inside)


def lay_out_numpy(
    num_rows: Tensor,
    draft_token: Tensor,
    positions: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *,
    tokens: int,
    slots: int,
    places: int,
) -> Layout:
    """Twin of :func:`lay_out`. numpy calls cost half of torch's, and there are fewer of them."""
    device = num_rows.device
    lens, drafts, at, pool, pools, before = (
        table.cpu().numpy()
        for table in (num_rows, draft_token, positions, req_to_token, req_pool_indices, seq_lens)
    )
    batch, last, total = len(lens), pool.shape[1] - 1, int(lens.sum())
    width = len(drafts) // max(batch, 1)
    owner = np.repeat(np.arange(batch), lens)  # [R], of the verified rows
    node = np.arange(total) - np.repeat(np.cumsum(lens) - lens, lens)
    row = owner * width + node

    behind = before[:, None] + np.arange(max(places, width))
    slot = np.where(behind > last, 0, pool[pools[:, None], np.minimum(behind, last)])
    of_rows = np.zeros((5, tokens), dtype=np.int64)
    of_rows[3, total:] = batch * width
    of_rows[:, :total] = drafts[row], at[row], slot[owner, node], row, owner

    left, spare = tokens - total, slots - batch
    each = np.empty(slots, dtype=np.int64)
    each[:batch] = lens
    each[batch:] = left // max(spare, 1) + (np.arange(spare) < left % max(spare, 1))
    if not spare and batch:
        each[-1] += left
    keys = each + 1
    keys[:batch] += before - 1
    of_slots = np.zeros((4, slots + 1), dtype=np.int32)
    of_slots[0, :slots], of_slots[2, :slots] = each, keys
    each.cumsum(out=of_slots[1, 1:], dtype=np.int32)
    keys.cumsum(out=of_slots[3, 1:], dtype=np.int32)
    rows, sizes = (torch.from_numpy(table).to(device) for table in (of_rows, of_slots))
    window = torch.from_numpy(slot[:, :places].astype(np.int64)).to(device)
    ids, places_of, locs, strided, request = rows.unbind()
    of_each, starts, of_keys, key_starts = sizes.unbind()
    return Layout(
        ids, places_of, locs, strided, request, window,
        of_each[:slots], starts, of_keys[:slots], key_starts,
    )  # fmt: skip

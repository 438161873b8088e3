"""FlashInfer's packed custom mask for trees: words of ancestors, offsets, bytes.

A request with n rows after a prefix of L tokens has a bit string of n * (L + n). Row q sees key k
if bit q * (L + n) + k is set, lowest bit of a byte first. Rows are not aligned, requests start at a
byte. Prefix bits are 1. The others come from the row's *words*, bit j % 64 of word j // 64 for node
j::

    n = 2, L = 3, node 1 below the root        row 0  11110   row 1  11111
                                               bytes  0b11101111, 0b00000011

It builds no bool mask and reads nothing on the host: the work is proportional to the packed bytes.
Kernels and twins as in :mod:`sglang_c2t.kernels.rows`.

Legend: B requests, N rows a request, S >= B slots, W = ceil(N / 64) words a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import block_of, block_of_batch, runs_triton, splits_of
from sglang_c2t.tree import WORD_BITS, ancestor_words, visible_nodes

INT32_MAX = 2**31 - 1


# -- words --------------------------------------------------------------------------------


@triton.jit
def _ancestor_words_kernel(parents, words, num_nodes, num_words, max_depth, BLOCK_N: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    node = tl.arange(0, BLOCK_N)
    live = node < num_nodes
    parents += request * num_nodes
    one = tl.full([BLOCK_N], 1, tl.int64)
    bits = tl.where(node // 64 == word, one << (node % 64).to(tl.int64), 0)
    if word == 0:
        bits |= 1  # the root
    above = tl.load(parents + node, mask=live, other=-1)
    for _ in range(max_depth):
        here = (above > 0) & (above // 64 == word)
        bits |= tl.where(here, one << (above % 64), 0)
        above = tl.load(parents + above, mask=above > 0, other=-1)
    tl.store(words + (request * num_nodes + node) * num_words + word, bits, mask=live)


def ancestor_words_from_parents(parents: Tensor, max_depth: int) -> Tensor:
    """[B, N, W] int64: for each row the nodes it sees, itself and its ancestors, as bits.

    ``parents`` [B, N] int64 as in :class:`sglang_c2t.tree.Trees`; padding sees itself and the root.
    One launch, 8 N (1 + W) bytes a request; a node follows at most ``max_depth`` links. It equals
    ``ancestor_words(visible_nodes(parents, max_depth))``, whose bool table has N * N cells a
    request.
    """
    if not runs_triton(parents):
        return ancestor_words_from_parents_torch(parents, max_depth)
    batch, num_nodes = parents.shape
    num_words = -(-num_nodes // WORD_BITS)
    words = parents.new_empty((batch, num_nodes, num_words), dtype=torch.int64)
    if words.numel():
        _ancestor_words_kernel[(batch, num_words)](
            parents.contiguous(), words, num_nodes, num_words, max_depth,
            BLOCK_N=block_of(num_nodes),
        )  # fmt: skip
    return words


def ancestor_words_from_parents_torch(parents: Tensor, max_depth: int) -> Tensor:
    """Twin of :func:`ancestor_words_from_parents`."""
    return ancestor_words(visible_nodes(parents, max_depth))


# -- offsets ------------------------------------------------------------------------------


def mask_capacity(num_tokens: int, slots: int, max_kv_len: int) -> int:
    """Return the bytes for the mask of any batch within these numbers of rows, slots and keys.
    Raises ValueError if an offset could exceed int32, which FlashInfer reads.
    """
    size = -(-num_tokens * max_kv_len // 8) + slots
    if size > INT32_MAX:
        raise ValueError(
            f"a mask of {num_tokens} rows on up to {max_kv_len} keys takes {size} bytes, but "
            f"FlashInfer's offsets end at {INT32_MAX}: lower the number of rows or the context"
        )
    return size


@triton.jit(do_not_specialize=["batch", "slots"])
def _mask_indptr_kernel(prefix_lens, num_rows, out, batch, slots, BLOCK_S: tl.constexpr):
    slot = tl.arange(0, BLOCK_S)
    rows = tl.load(num_rows + slot, mask=slot < batch, other=0).to(tl.int64)
    keys = tl.load(prefix_lens + slot, mask=slot < batch, other=0) + rows
    ends = tl.cumsum((rows * keys + 7) // 8, 0)
    tl.store(out + slot + 1, ends.to(tl.int32), mask=slot < slots)
    tl.store(out, 0)


def mask_indptr(
    prefix_lens: Tensor, num_rows: Tensor, slots: int, out: Tensor | None = None
) -> Tensor:
    """[S + 1] int32: first byte of each request's mask, and the end.

    A request takes ceil(n * (L + n) / 8) bytes, n = ``num_rows`` [B], L = ``prefix_lens`` [B];
    slots after B take none. Offsets fit if the server's :func:`mask_capacity` does. Fills ``out``
    [>= S + 1] if given. One launch of one block. Source: FlashInfer's ``segment_packbits``, which
    also reads the host.
    """
    if out is None:
        out = num_rows.new_empty(slots + 1, dtype=torch.int32)
    if not runs_triton(num_rows):
        return mask_indptr_torch(prefix_lens, num_rows, slots, out)
    _mask_indptr_kernel[(1,)](
        prefix_lens, num_rows, out, len(num_rows), slots, BLOCK_S=block_of_batch(slots)
    )
    return out[: slots + 1]


def mask_indptr_torch(prefix_lens: Tensor, num_rows: Tensor, slots: int, out: Tensor) -> Tensor:
    """Twin of :func:`mask_indptr`."""
    rows = num_rows.long()
    ends = ((rows * (prefix_lens + rows) + 7) // 8).cumsum(0)  # [B]
    starts = out[: slots + 1]
    starts[0] = 0
    starts[1 : len(rows) + 1] = ends
    starts[len(rows) + 1 :] = ends[-1] if len(rows) else 0
    return starts


# -- bytes --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["capacity"])
def _pack_tree_mask_kernel(
    words, prefix_lens, num_rows, mask_indptr, out, max_rows, num_words, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    rows = tl.load(num_rows + request).to(tl.int32)
    kv_len = prefix + rows
    num_bytes = ((rows.to(tl.int64) * kv_len + 7) // 8).to(tl.int32)
    start = tl.load(mask_indptr + request).to(tl.int64)
    words += request * max_rows * num_words
    byte = tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)[None, :]
    # The programs of a request share its blocks in turn.
    first, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    for begin in range(first, num_bytes, step):
        # The block's first bit may exceed 2**31; from there on int32 is enough.
        first_bit = tl.cast(begin, tl.int64) * 8
        first_row = (first_bit // kv_len).to(tl.int32)
        key = (first_bit - first_row.to(tl.int64) * kv_len).to(tl.int32) + byte * 8  # [BLOCK]
        row = key // kv_len
        key -= row * kv_len
        packed = byte * 0 + 255
        if tl.max(key) + 8 > prefix:  # otherwise the block lies in one row's prefix
            key_of_bit = key[:, None] + bit
            further = (key_of_bit >= kv_len).to(tl.int32)  # rows that a byte reaches past its own
            if kv_len < 8:  # it may reach past the next row; elsewhere a division is slow
                further = key_of_bit // kv_len
            node = key_of_bit - further * kv_len - prefix
            row_of_bit = first_row + row[:, None] + further
            exists = row_of_bit < rows
            own = exists & (node >= 0)
            at = row_of_bit.to(tl.int64) * num_words + node // 64
            word = tl.load(words + at, mask=own, other=0)
            seen = (word >> (node % 64).to(tl.int64)).to(tl.int32) & 1
            seen = tl.where(own, seen, exists.to(tl.int32))
            packed = tl.sum(seen << bit, axis=1)
        here = begin + byte
        inside = (here < num_bytes) & (start + here < capacity)
        tl.store(out + start + here, packed.to(tl.uint8), mask=inside)


def pack_tree_mask(
    words: Tensor, prefix_lens: Tensor, num_rows: Tensor, mask_indptr: Tensor, out: Tensor
) -> Tensor:
    """Write the packed custom mask of a batch of trees to ``out`` and return it.

    It leaves bytes outside the B requests unchanged. One launch; moves the mask's bytes and the
    words.
    Source: FlashInfer's ``segment_packbits``, which reads a byte per bit and has one thread block a
    request. Bit order: ``variants.cuh``, ``custom_mask_ptr``.

    Args:
        words: [B, N, W] int64, :func:`ancestor_words_from_parents`.
        prefix_lens: [B] int, L.
        num_rows: [B] int in [0, N].
        mask_indptr: [>= B + 1] int32, :func:`mask_indptr`.
        out: [capacity] uint8.
    """
    if not runs_triton(out):
        return pack_tree_mask_torch(words, prefix_lens, num_rows, mask_indptr, out)
    batch, max_rows, num_words = words.shape
    if batch:
        _pack_tree_mask_kernel[(batch, splits_of(batch))](
            words.contiguous(), prefix_lens, num_rows, mask_indptr, out,
            max_rows, num_words, len(out), BLOCK=128,
        )  # fmt: skip
    return out


def pack_tree_mask_torch(
    words: Tensor, prefix_lens: Tensor, num_rows: Tensor, mask_indptr: Tensor, out: Tensor
) -> Tensor:
    """Twin of :func:`pack_tree_mask`."""
    batch = len(words)
    if words.numel() == 0:
        return out
    starts = mask_indptr.long()[: batch + 1]
    byte = torch.arange(len(out), device=out.device)
    request = torch.searchsorted(starts[1:], byte, right=True)  # [capacity], B after the masks
    inside = request < batch
    request = request.clamp(max=batch - 1)[:, None]
    bit = torch.arange(8, device=out.device)
    offset = (byte[:, None] - starts[request]) * 8 + bit  # [capacity, 8], in the bit string
    rows, prefix = num_rows.long()[request], prefix_lens.long()[request]
    kv_len = (prefix + rows).clamp(min=1)
    row, node = offset // kv_len, offset % kv_len - prefix
    exists = inside[:, None] & (row < rows)
    own = exists & (node >= 0)
    row, node = row.masked_fill(~own, 0), node.masked_fill(~own, 0)
    seen = (words[request, row, node // WORD_BITS] >> (node % WORD_BITS)) & 1
    packed = (torch.where(own, seen, exists.long()) << bit).sum(dim=1)
    return out.copy_(torch.where(inside, packed.to(torch.uint8), out))

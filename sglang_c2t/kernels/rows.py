"""Packed rows of the target's forward: scatter and index kernels.

Each of B requests has N strided rows, of which the first ``verify_lens[b]`` are verified. Packed
rows are consecutive, one request after the other (see ``layout.py``)::

    verify_lens [3, 1], N = 4     strided   0 1 2 . | 4 . . .
                                  packed    0 1 2 4

Everything here has static shapes and reads nothing on the host. A kernel runs on CUDA tensors (or
under TRITON_INTERPRET=1). Elsewhere its twin runs, ``NAME_torch`` or ``NAME_numpy``, with the same
arguments. All but :func:`scatter_rows` and :func:`ragged_kv_indices` move a few kB a step, so their
cost is the launch. Sizes that change from step to step are no constants of a kernel. A server
compiles each kernel once per 32, 64, 128, ... requests, and not while serving.

Legend: B requests, N rows a request, T packed rows (>= the sum of verify_lens), S >= B slots.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Thread blocks that fill a large GPU several times; loops over keys are split into so many.
FULL_GRID = 1024


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels run on this tensor: it is on a GPU, or Triton interprets."""
    return tensor.is_cuda or triton.knobs.runtime.interpret


def block_of(size: int) -> int:
    """Return the power of two that covers ``size`` lanes; at least 1."""
    return triton.next_power_of_2(max(size, 1))


def block_of_batch(batch: int) -> int:
    """Return the lanes for all requests of a batch; few values, because each compiles a kernel."""
    return max(block_of(batch), 32)


def splits_of(batch: int) -> int:
    """Return the thread blocks that share one request's loop."""
    return max(FULL_GRID // max(batch, 1), 1)


def with_equal_strides(*tables: Tensor) -> tuple[Tensor, ...]:
    """Return the tables with equal strides: unchanged, or contiguous if their strides differ."""
    if len({table.stride() for table in tables}) == 1:
        return tables
    return tuple(table.contiguous() for table in tables)


def aligned_tables(
    like: Tensor, count: int, rows: int, columns: int
) -> tuple[Tensor, list[Tensor]]:
    """Allocate ``count`` tables [rows, columns] of the dtype of ``like`` in one piece of memory.
    Returns that memory [count, ...] and the tables. Each begins at a multiple of 16 bytes;
    otherwise Triton would compile another variant of a kernel that reads it.
    """
    apart = -(-rows * columns // 16) * 16
    memory = like.new_empty((count, apart))
    return memory, [table[: rows * columns].view(rows, columns) for table in memory]


@triton.jit
def threshold(keys, count, BITS: tl.constexpr):
    """Return the largest number of BITS bits that at least ``count`` keys reach."""
    found = tl.zeros([], dtype=keys.dtype)
    one = tl.full([], 1, keys.dtype)
    for bit in range(BITS):
        tried = found | (one << (BITS - 1 - bit))
        found = tl.where(tl.sum((keys >= tried).to(tl.int32)) >= count, tried, found)
    return found


@triton.jit
def rows_before(verify_lens, request, batch, BLOCK_B: tl.constexpr):
    """Return the rows of all requests before this one; request number ``batch`` gives all rows."""
    index = tl.arange(0, BLOCK_B)
    lens = tl.load(verify_lens + index, mask=index < tl.minimum(request, batch), other=0)
    return tl.sum(lens.to(tl.int64))


# -- tables of rows -----------------------------------------------------------------------


@triton.jit(do_not_specialize=["batch"])
def _scatter_rows_kernel(
    packed, verify_lens, out, batch, width, columns, packed_stride, out_stride,
    BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request = row // width
    node = row - request * width
    source = rows_before(verify_lens, request, batch, BLOCK_B) + node
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < columns
    live = inside & (node < tl.load(verify_lens + request))
    values = tl.load(packed + source * packed_stride + column, mask=live, other=0)
    tl.store(out + row.to(tl.int64) * out_stride + column, values, mask=inside)


def scatter_rows(
    packed: Tensor, verify_lens: Tensor, width: int, out: Tensor | None = None
) -> Tensor:
    """[B * N, W]: packed rows at their strided places; rows not verified are 0.

    ``packed`` is [T, W], any dtype, the last dimension contiguous; ``verify_lens`` [B], N =
    ``width``. Fills ``out`` [>= B * N, W] if given and returns its first B * N rows.

    One launch over the destination, (R + B * N) W elements moved, R = sum of verify_lens: the
    minimum for a zero-filled table (fill and copy move R W elements more). Source: SGLang's
    ``ScatterCompactToStrided``.
    """
    batch, columns = len(verify_lens), packed.shape[1]
    triton_runs = runs_triton(packed)
    if out is None and not triton_runs and len(packed) == int(verify_lens.sum()) == batch * width:
        return packed  # all rows are there
    if out is None:
        out = packed.new_empty(batch * width, columns)
    if not triton_runs:
        return scatter_rows_torch(packed, verify_lens, width, out)
    full = out[: batch * width]
    assert packed.stride(1) == full.stride(1) == 1, (packed.stride(), full.stride())
    if full.numel() == 0:
        return full
    block = min(block_of(columns), 4096)
    _scatter_rows_kernel[(batch * width, triton.cdiv(columns, block))](
        packed, verify_lens, full, batch, width, columns, packed.stride(0), full.stride(0),
        BLOCK_B=block_of_batch(batch), BLOCK_W=block,
    )  # fmt: skip
    return full


def scatter_rows_torch(packed: Tensor, verify_lens: Tensor, width: int, out: Tensor) -> Tensor:
    """Twin of :func:`scatter_rows`."""
    full = out[: len(verify_lens) * width]
    lens = verify_lens.long()[:, None]
    node = torch.arange(width, device=packed.device)
    live = node < lens  # [B, N]
    source = (lens.cumsum(0) - lens + node).masked_fill(~live, 0)
    if full.numel():
        full.copy_(packed[source.flatten()].masked_fill(~live.flatten()[:, None], 0))
    return full


# -- SGLang's links of chains -------------------------------------------------------------


@triton.jit(do_not_specialize=["width"])
def _chain_links_kernel(lens, copied, links, width, BLOCK_N: tl.constexpr):
    this = tl.program_id(0)
    node = tl.arange(0, BLOCK_N)
    rows = tl.load(lens + this).to(tl.int32)
    tl.store(copied + this, rows)
    behind = tl.where(node + 1 < rows, node + 1, -1).to(tl.int64)
    tl.store(links + this.to(tl.int64) * width + node, behind, mask=node < width)


def chain_links(lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Link cut chains: return ``lens`` [B] in [1, N] as a new int32 tensor, and the links. The
    links [B, N] int64 are the next row of each row, -1 after the last. N = ``width``. SGLang's
    kernels follow them, so a cut chain ends there and its bonus token comes from that row. One
    launch.
    """
    if not runs_triton(lens):
        return chain_links_torch(lens, width)
    copied = lens.new_empty(len(lens), dtype=torch.int32)
    links = lens.new_empty((len(lens), width), dtype=torch.int64)
    if len(lens):
        _chain_links_kernel[(len(lens),)](lens, copied, links, width, BLOCK_N=block_of(width))
    return copied, links


def chain_links_torch(lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Twin of :func:`chain_links`."""
    behind = torch.arange(1, width + 1, device=lens.device).expand(len(lens), width)
    return lens.to(torch.int32, copy=True), behind.masked_fill(behind >= lens[:, None], -1)


# -- FlashInfer's index arrays ------------------------------------------------------------


@triton.jit(do_not_specialize=["batch", "slots", "ghost"])
def _indptr_kernel(
    lengths, prefix_lens, out, batch, slots, ghost,
    HAS_PREFIX: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, BLOCK_S)
    live = slot < batch
    length = tl.load(lengths + slot, mask=live, other=0).to(tl.int64)
    if HAS_PREFIX:
        length += tl.load(prefix_lens + slot, mask=live, other=0)
    length = tl.where(live, length, ghost)
    tl.store(out + slot + 1, tl.cumsum(length, 0).to(tl.int32), mask=slot < slots)
    tl.store(out, 0)


def indptr(
    lengths: Tensor,
    slots: int,
    *,
    prefix_lens: Tensor | None = None,
    ghost: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """[S + 1] int32: start of each slot, and the end. ``lengths`` [B] int, plus ``prefix_lens`` [B]
    if given; slots after B have length ``ghost``. Lengths 3, 1 in 4 slots: 0, 3, 4, 4, 4. Fills
    ``out`` [>= S + 1] if given. One launch of one block. Source: SGLang's ``BuildQoIndptr``.
    """
    if out is None:
        out = lengths.new_empty(slots + 1, dtype=torch.int32)
    if not runs_triton(lengths):
        return indptr_torch(lengths, slots, prefix_lens=prefix_lens, ghost=ghost, out=out)
    _indptr_kernel[(1,)](
        lengths, lengths if prefix_lens is None else prefix_lens, out, len(lengths), slots, ghost,
        HAS_PREFIX=prefix_lens is not None, BLOCK_S=block_of_batch(slots),
    )  # fmt: skip
    return out[: slots + 1]


def indptr_torch(
    lengths: Tensor, slots: int, *, prefix_lens: Tensor | None, ghost: int, out: Tensor
) -> Tensor:
    """Twin of :func:`indptr`."""
    total = lengths.long() if prefix_lens is None else lengths.long() + prefix_lens
    padded = torch.nn.functional.pad(total, (0, slots - len(lengths)), value=ghost)
    starts = out[: slots + 1]
    starts[0] = 0
    starts[1:] = padded.cumsum(0)
    return starts


@triton.jit(do_not_specialize=["capacity"])
def _kv_indices_kernel(
    req_to_token, req_pool_indices, seq_lens, verify_lens, kv_indptr, out,
    pool_stride, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    slots = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * pool_stride
    start = tl.load(kv_indptr + request).to(tl.int64)
    length = (tl.load(seq_lens + request) + tl.load(verify_lens + request)).to(tl.int32)
    # The programs of a request share its blocks in turn.
    first, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    for begin in range(first, length, step):
        entry = begin + tl.arange(0, BLOCK)
        inside = (entry < length) & (start + entry < capacity)
        slot = tl.load(slots + entry, mask=inside)
        tl.store(out + start + entry, slot.to(tl.int32), mask=inside)


def ragged_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    kv_indptr: Tensor,
    out: Tensor,
) -> Tensor:
    """Write FlashInfer's page-size-1 kv_indices: each request's committed slots, then its rows'.

    One launch, 8 bytes a key. Entries after the B requests (those of ghost slots) stay unchanged:
    no row reads them. Source: SGLang's ``create_flashinfer_kv_indices_triton``, one thread block a
    request.

    Args:
        req_to_token: [pool, >= seq_lens + verify_lens] int32, the last dimension contiguous.
        req_pool_indices: [B] int.
        seq_lens: [B] int, the root not counted.
        verify_lens: [B] int.
        kv_indptr: [>= B + 1] int32, ``indptr(verify_lens, slots, prefix_lens=seq_lens)``.
        out: [capacity] int32, written in place.
    """
    if not runs_triton(out):
        return ragged_kv_indices_torch(
            req_to_token, req_pool_indices, seq_lens, verify_lens, kv_indptr, out
        )
    batch = len(verify_lens)
    if batch:
        _kv_indices_kernel[(batch, splits_of(batch))](
            req_to_token, req_pool_indices, seq_lens, verify_lens, kv_indptr, out,
            req_to_token.stride(0), len(out), BLOCK=1024,
        )  # fmt: skip
    return out


def ragged_kv_indices_torch(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    kv_indptr: Tensor,
    out: Tensor,
) -> Tensor:
    """Twin of :func:`ragged_kv_indices`."""
    batch = len(verify_lens)
    if batch == 0:
        return out
    entry = torch.arange(len(out), device=out.device)
    request = torch.searchsorted(kv_indptr[1 : batch + 1].long(), entry, right=True)
    request = request.clamp(max=batch - 1)
    key = entry - kv_indptr[request]
    inside = key < (seq_lens + verify_lens)[request]
    slot = req_to_token[req_pool_indices[request], key.masked_fill(~inside, 0)]
    return out.copy_(torch.where(inside, slot, out))


# -- exact ancestors in draft attention ---------------------------------------------------


@triton.jit
def _follow_ancestors_kernel(
    kv_indptr, kv_indices, ancestor_rows, topk, depth, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    request = tl.program_id(0)
    row = tl.arange(0, BLOCK_K)[:, None]
    step = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < topk) & (step < depth)
    ends = kv_indptr + request * topk + 1
    own_tail = tl.load(ends + row, mask=row < topk, other=0) - depth  # [K, 1]
    ancestor = tl.load(ancestor_rows + (request * topk + row) * depth + step, mask=inside, other=0)
    tail = tl.load(ends + ancestor, mask=inside, other=0) - depth
    slot = tl.load(kv_indices + tail + step, mask=inside)
    # The barrier keeps all loads of the block before its first store: a request's rows read each
    # other's entries, and no other request's.
    tl.debug_barrier()
    tl.store(kv_indices + own_tail + step, slot, mask=inside)


def follow_ancestors(kv_indptr: Tensor, kv_indices: Tensor, ancestor_rows: Tensor) -> None:
    """Point each beam row's last index entries at its ancestors' slots, in place.

    SGLang has filled ``kv_indptr`` [>= B * K + 1] and ``kv_indices`` [entries] int32: a row ends
    with the d slots it wrote itself, one per step. ``ancestor_rows`` is [B, K, d] int64. One
    launch, one thread block a request, 16 B K d bytes; safe in a CUDA graph.
    """
    if not runs_triton(kv_indices):
        return follow_ancestors_torch(kv_indptr, kv_indices, ancestor_rows)
    batch, topk, depth = ancestor_rows.shape
    if ancestor_rows.numel():
        _follow_ancestors_kernel[(batch,)](
            kv_indptr, kv_indices, ancestor_rows.contiguous(), topk, depth,
            BLOCK_K=block_of(topk), BLOCK_D=block_of(depth),
        )  # fmt: skip


def follow_ancestors_torch(kv_indptr: Tensor, kv_indices: Tensor, ancestor_rows: Tensor) -> None:
    """Twin of :func:`follow_ancestors`."""
    batch, topk, depth = ancestor_rows.shape
    ends = kv_indptr[1 : batch * topk + 1].long()[:, None]
    tail = ends - depth + torch.arange(depth, device=ends.device)  # [B * K, d]
    written = kv_indices[tail].view(batch, topk, depth)
    kv_indices[tail] = written.gather(1, ancestor_rows).view(batch * topk, depth)

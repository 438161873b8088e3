"""Selects the best drafts of a batch within the rows that a step may verify.

Each of B requests has d drafts whose survival falls from one to the next. The n best of all are
verified, which maximises the expected tokens of n rows::

    survival  0.9 0.7 0.1      n = 3: 0.9, 0.8, 0.7     rows 3  (root, two drafts)
              0.8 0.3 0.2                                    2

Survival falls along a chain and the shallower of equal drafts comes first, so the selection has no
gaps. In trees it falls along each path, and of equal nodes the lower number comes first.

One launch, static shapes, no host reads; n is no constant of the kernel. Kernels and twins as in
:mod:`sglang_c2t.kernels.rows`.

Legend: B requests, D layers of a full chain, d of them drafted, N rows of a full chain or nodes of
a tree, root included.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import (
    block_of,
    block_of_batch,
    chain_links_torch,
    runs_triton,
    threshold,
)
from sglang_c2t.tree import best_of_batch


def chains_within(
    survival: Tensor,
    drafts: int,
    width: int,
    whole: Tensor | None = None,
    *,
    layers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cut chains to the selected drafts.

    Returns the rows of each request, root included, [B] int32 in [1, d + 1]. Returns also [B, N]
    int64, the next row of each row, -1 after the last (see :func:`.rows.chain_links`).

    Args:
        survival: [B, D] float32 in [0, 1], falling along each row; rows may be strided.
        drafts: Number of drafts to keep of the requests that are not ``whole``.
        width: N > d, rows of a full chain.
        whole: [B] bool: requests whose full drafts are kept in addition. ``None``: none.
        layers: d of the D layers; ``None``: all. No constant of the kernel, but D is.
    """
    batch, most = survival.shape
    layers = most if layers is None else layers
    if not runs_triton(survival):
        return chains_within_torch(survival[:, :layers], drafts, width, whole)
    rows = survival.new_empty(batch, dtype=torch.int32)
    links = survival.new_empty((batch, width), dtype=torch.int64)
    _chains_within_kernel[(1,)](
        survival,
        survival.stride(0),
        rows if whole is None else whole,
        rows,
        links,
        drafts,
        batch,
        layers,
        width,
        ANY_WHOLE=whole is not None,
        BLOCK_B=block_of_batch(batch),
        BLOCK_D=block_of(most),
        BLOCK_N=block_of(width),
        num_warps=4,
    )
    return rows, links


def chains_within_torch(
    survival: Tensor, drafts: int, width: int, whole: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`chains_within`, for all layers."""
    batch, layers = survival.shape
    ranked = survival if whole is None else survival.masked_fill(whole[:, None], -1.0)
    # Layer by layer and stable: of equal drafts the shallower first.
    order = ranked.T.flatten().sort(descending=True, stable=True).indices[: max(drafts, 0)]
    kept = torch.zeros(layers * batch, dtype=torch.int32, device=survival.device)
    kept[order] = 1
    kept = kept.view(layers, batch)
    if whole is not None:
        kept = kept.masked_fill(whole, 1)
    return chain_links_torch(1 + kept.sum(dim=0, dtype=torch.int32), width)


def nodes_within(
    survival: Tensor, depth: Tensor, drafts: int, whole: Tensor | None = None
) -> Tensor:
    """[B, N - 1] bool: the selected nodes, roots not included.

    Args:
        survival: [B, N] float32 in [0, 1], falling along each path; contiguous.
        depth: [B, N] int64 of :class:`~sglang_c2t.tree.Trees`; may be strided.
        drafts: Number of drafts to keep of the requests that are not ``whole``.
        whole: [B] bool: requests whose full trees are kept in addition. ``None``: none.
    """
    if not runs_triton(survival):
        return nodes_within_torch(survival, depth, drafts, whole)
    batch, num_nodes = survival.shape
    kept = survival.new_empty((batch, num_nodes - 1), dtype=torch.bool)
    block_b, block_n = block_of_batch(batch), block_of(num_nodes - 1)
    _nodes_within_kernel[(1,)](
        survival,
        depth,
        kept if whole is None else whole,
        kept,
        drafts,
        batch,
        num_nodes,
        *depth.stride(),
        ANY_WHOLE=whole is not None,
        BLOCK_B=block_b,
        BLOCK_N=block_n,
        num_warps=4 if block_b * block_n <= 2048 else 16,
    )
    return kept


def nodes_within_torch(
    survival: Tensor, depth: Tensor, drafts: int, whole: Tensor | None = None
) -> Tensor:
    """Twin of :func:`nodes_within`."""
    live = depth[:, 1:] > 0
    ranked = live if whole is None else live & ~whole[:, None]
    return best_of_batch(survival[:, 1:], ranked, drafts) | (live & ~ranked)


@triton.jit
def _best(values, ranked, drafts):
    """[D, B] int32: 1 at the ``drafts`` largest ``ranked`` values, of equal ones the first."""
    # Non-negative floats have the order of their bits.
    keys = tl.maximum(values, 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(ranked, keys, -1)
    least = threshold(keys, drafts, 31)
    above = (keys > least).to(tl.int32)
    equal = ((keys == least) & ranked).to(tl.int32)
    of_layer = tl.sum(equal, axis=1)
    before = tl.cumsum(of_layer, axis=0) - of_layer
    turn = tl.cumsum(equal, axis=1) + before[:, None]
    return above + equal * (turn <= drafts - tl.sum(above)).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "drafts", "batch", "layers", "width"])
def _chains_within_kernel(
    survival, stride, whole, rows, links, drafts, batch, layers, width,
    ANY_WHOLE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    request = tl.arange(0, BLOCK_B)
    layer = tl.arange(0, BLOCK_D)
    real = (request < batch)[None, :] & (layer < layers)[:, None]  # [D, B]
    values = tl.load(survival + request[None, :] * stride + layer[:, None], mask=real, other=0.0)
    all_of_it = tl.zeros([BLOCK_B], dtype=tl.int1)
    if ANY_WHOLE:
        all_of_it = tl.load(whole + request, mask=request < batch, other=0) != 0
    kept = _best(values, real & ~all_of_it[None, :], drafts)
    kept = tl.where(real & all_of_it[None, :], 1, kept)
    here = 1 + tl.sum(kept, axis=0)
    tl.store(rows + request, here, mask=request < batch)
    node = tl.arange(0, BLOCK_N)[:, None]
    behind = tl.where(node + 1 < here[None, :], node + 1, -1).to(tl.int64)
    inside = (request < batch)[None, :] & (node < width)
    tl.store(links + request[None, :] * width + node, behind, mask=inside)


@triton.jit(do_not_specialize=["drafts", "batch", "num_nodes", "row_stride", "node_stride"])
def _nodes_within_kernel(
    survival, depth, whole, kept, drafts, batch, num_nodes, row_stride, node_stride,
    ANY_WHOLE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    request = tl.arange(0, BLOCK_B)[None, :]
    node = 1 + tl.arange(0, BLOCK_N)[:, None]
    real = (request < batch) & (node < num_nodes)  # [N - 1, B]
    deep = tl.load(depth + request * row_stride + node * node_stride, mask=real, other=0)
    values = tl.load(survival + request * num_nodes + node, mask=real, other=0.0)
    live = real & (deep > 0)
    all_of_it = tl.zeros([1, BLOCK_B], dtype=tl.int1)
    if ANY_WHOLE:
        all_of_it = tl.load(whole + request, mask=request < batch, other=0) != 0
    best = _best(values, live & ~all_of_it, drafts) != 0
    tl.store(kept + request * (num_nodes - 1) + node - 1, best | (live & all_of_it), mask=real)

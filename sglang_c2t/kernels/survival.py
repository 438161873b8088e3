"""Survivals of drafts from confidences and an estimator's values.

``values`` [D, K] are survivals by layer and by confidence, for K bins of its log odds from -L to L,
with linear interpolation between their middles (:class:`sglang_c2t.plan.survival.Survival`).
Survival falls along a path, so a draft has the least value of itself and those before it::

    chain   confidence 0.9 0.4 0.8    least 0.9 0.4 0.4    survival of each, falling
    tree    least on each path        survival of each     least on each path

One launch, 12 bytes a draft, static shapes, no host reads. Kernels and twins as in
:mod:`sglang_c2t.kernels.rows`.

Legend: B requests, d <= D drafted layers, N nodes of a tree, K bins.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import block_of, runs_triton, with_equal_strides
from sglang_c2t.tree import least_on_path

#: Confidences are clipped to [EPS, 1 - EPS].
EPS = 1e-6

#: Requests per thread block.
CHAINS = 32


def survival_of_chains(
    values: Tensor, confidences: Tensor, limit: float, *, out: Tensor, kept: Tensor
) -> None:
    """Compute the survivals of drafts of chains.

    Args:
        values: [D, K] float32.
        confidences: [B, d] float32; may be strided. Values below 0 and nan count as 0, above 1 as
        1.
        limit: L.
        out: [B, d] float32, written: survivals, falling along each row. Layers are adjacent.
        kept: [B, d] float32 with the strides of ``out``, written: the confidences.
    """
    if not runs_triton(confidences):
        survival_of_chains_torch(values, confidences, limit, out=out, kept=kept)
        return
    assert out.stride() == kept.stride(), (out.stride(), kept.stride())
    batch, layers = confidences.shape
    _chains_kernel[(triton.cdiv(batch, CHAINS),)](
        values, confidences, out, kept, batch, layers, *confidences.stride(), out.stride(0),
        BINS=values.shape[1], LIMIT=limit, EPS=EPS, BLOCK_B=CHAINS, num_warps=1,
    )  # fmt: skip


def survival_of_chains_torch(
    values: Tensor, confidences: Tensor, limit: float, *, out: Tensor, kept: Tensor
) -> None:
    """Twin of :func:`survival_of_chains`."""
    layer = torch.arange(confidences.shape[1], device=values.device)
    least = torch.cummin(confidences.nan_to_num(0.0), dim=1).values
    survival = _own(values, layer, least, limit)
    out.copy_(torch.cummin(survival, dim=1).values)
    kept.copy_(confidences)


def survival_of_nodes(
    values: Tensor, least: Tensor, depth: Tensor, parents: Tensor, limit: float
) -> Tensor:
    """[B, N] float32, falling along each path, 1 for roots and padding.

    Args:
        values: [D, K] float32.
        least: [B, N] float32: the least confidence on each node's path, contiguous.
        depth: [B, N] int64 of :class:`~sglang_c2t.tree.Trees`; may be strided.
        parents: [B, N] int64, with the same strides.
        limit: L.
    """
    if not runs_triton(least):
        return survival_of_nodes_torch(values, least, depth, parents, limit)
    depth, parents = with_equal_strides(depth, parents)
    batch, num_nodes = least.shape
    survival = torch.empty_like(least)
    _nodes_kernel[(batch,)](
        values, least, depth, parents, survival, num_nodes, *depth.stride(),
        BINS=values.shape[1], DEPTH=values.shape[0], LIMIT=limit, EPS=EPS,
        BLOCK_N=block_of(num_nodes), num_warps=1 if num_nodes <= 64 else 4,
    )  # fmt: skip
    return survival


def survival_of_nodes_torch(
    values: Tensor, least: Tensor, depth: Tensor, parents: Tensor, limit: float
) -> Tensor:
    """Twin of :func:`survival_of_nodes`."""
    survival = _own(values, (depth - 1).clamp(min=0), least, limit).masked_fill(depth == 0, 1.0)
    return least_on_path(survival, parents, len(values))


def _own(values: Tensor, layer: Tensor, least: Tensor, limit: float) -> Tensor:
    """[B, ...]: survival of ``least`` [B, ...] in a ``layer`` [...] from 0, by ``values``."""
    bins = values.shape[1]
    place = (torch.logit(least, eps=EPS).clamp(-limit, limit) + limit) * (bins / (2 * limit))
    place = place - 0.5  # between the middles of bins
    left = place.floor().clamp(0, bins - 2)
    share = (place - left).clamp(0.0, 1.0)
    low, high = values[layer, left.long()], values[layer, left.long() + 1]
    return low + share * (high - low)


@triton.jit
def _said(values, layer, least, real, BINS: tl.constexpr, LIMIT: tl.constexpr, EPS: tl.constexpr):
    """Twin of :func:`_own` for lanes that are ``real``."""
    x = tl.minimum(tl.maximum(least, EPS), 1.0 - EPS)
    odds = tl.minimum(tl.maximum(tl.log(x / (1.0 - x)), -LIMIT), LIMIT)
    place = (odds + LIMIT) * (BINS / (2 * LIMIT)) - 0.5
    left = tl.minimum(tl.maximum(tl.floor(place), 0.0), BINS - 2.0)
    share = tl.minimum(tl.maximum(place - left, 0.0), 1.0)
    here = values + layer * BINS + left.to(tl.int32)
    low = tl.load(here, mask=real, other=0.0)
    return low + share * (tl.load(here + 1, mask=real, other=0.0) - low)


# With one layer, confidences are a row of a larger table.
@triton.jit(
    do_not_specialize=["batch", "layers", "row_stride", "layer_stride", "stride"],
    do_not_specialize_on_alignment=["confidences"],
)
def _chains_kernel(
    values, confidences, survival, kept, batch, layers, row_stride, layer_stride, stride,
    BINS: tl.constexpr, LIMIT: tl.constexpr, EPS: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    real = request < batch
    least = tl.full([BLOCK_B], 1.0, tl.float32)
    falling = tl.full([BLOCK_B], float("inf"), tl.float32)
    for layer in range(layers):
        sure = tl.load(
            confidences + request * row_stride + layer * layer_stride, mask=real, other=1.0
        )
        least = tl.minimum(least, tl.where(sure >= 0.0, sure, 0.0))  # nan is not
        falling = tl.minimum(falling, _said(values, layer, least, real, BINS, LIMIT, EPS))
        tl.store(survival + request * stride + layer, falling, mask=real)
        tl.store(kept + request * stride + layer, sure, mask=real)


@triton.jit(do_not_specialize=["num_nodes", "row_stride", "node_stride"])
def _nodes_kernel(
    values, least, depth, parents, survival, num_nodes, row_stride, node_stride,
    BINS: tl.constexpr, DEPTH: tl.constexpr, LIMIT: tl.constexpr, EPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    real = node < num_nodes
    parents += request * row_stride
    survival += request * num_nodes
    deep = tl.load(depth + request * row_stride + node * node_stride, mask=real, other=0)
    sure = tl.load(least + request * num_nodes + node, mask=real, other=0.0)
    layer = tl.maximum(deep - 1, 0)
    lowest = tl.where(deep == 0, 1.0, _said(values, layer, sure, real, BINS, LIMIT, EPS))
    tl.store(survival + node, lowest, mask=real)
    tl.debug_barrier()  # the loop reads what other lanes have written
    above = tl.load(parents + node * node_stride, mask=real, other=-1)
    for _ in range(DEPTH - 1):
        up = above > 0
        lowest = tl.minimum(lowest, tl.load(survival + above, mask=up, other=1.0))
        above = tl.load(parents + above * node_stride, mask=up, other=-1)
    tl.debug_barrier()  # and writes only after all have read
    tl.store(survival + node, lowest, mask=real)

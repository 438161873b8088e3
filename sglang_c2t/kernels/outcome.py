"""Outcomes of the drafts of a step, in one table for the host.

One launch, static shapes, no host reads. Kernels and twins as in :mod:`sglang_c2t.kernels.rows`.

Legend: B requests, d drafted layers, N nodes of a tree, S nodes of the longest path.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import block_of, runs_triton

#: Requests per thread block.
CHAINS = 32


def outcome_of_chains(confidences: Tensor, num_rows: Tensor, accept_lens: Tensor) -> Tensor:
    """[B, d + 2] float32: the confidences, and the numbers of verified and accepted drafts.
    ``confidences`` [B, d] float32, neighbours in a row; ``num_rows`` [B] integers, root included;
    ``accept_lens`` [B] integers, bonus included.
    """
    if not runs_triton(confidences):
        return outcome_of_chains_torch(confidences, num_rows, accept_lens)
    batch, layers = confidences.shape
    told = confidences.new_empty((batch, layers + 2))
    _chains_kernel[(triton.cdiv(batch, CHAINS),)](
        confidences, num_rows, accept_lens, told, batch, layers, confidences.stride(0),
        BLOCK_B=CHAINS, num_warps=1,
    )  # fmt: skip
    return told


def outcome_of_chains_torch(confidences: Tensor, num_rows: Tensor, accept_lens: Tensor) -> Tensor:
    """Twin of :func:`outcome_of_chains`."""
    counts = (count[:, None].float() - 1 for count in (num_rows, accept_lens))
    return torch.cat((confidences, *counts), dim=1)


@triton.jit(do_not_specialize=["batch", "layers", "stride"])
def _chains_kernel(
    confidences, num_rows, accept_lens, told, batch, layers, stride, BLOCK_B: tl.constexpr
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    real = request < batch
    here = told + request * (layers + 2)
    for layer in range(layers):
        sure = tl.load(confidences + request * stride + layer, mask=real)
        tl.store(here + layer, sure, mask=real)
    drafts = tl.load(num_rows + request, mask=real, other=1) - 1
    correct = tl.load(accept_lens + request, mask=real, other=1) - 1
    tl.store(here + layers, drafts.to(tl.float32), mask=real)
    tl.store(here + layers + 1, correct.to(tl.float32), mask=real)


def outcome_of_trees(
    depth: Tensor, keys: Tensor, chosen: Tensor, accept_index: Tensor, row_starts: Tensor
) -> Tensor:
    """[B, N - 1, 4] float32: depth, key, verified and accepted, for every node but the root.

    Args:
        depth: [B, N] int64 of :class:`~sglang_c2t.tree.Trees`; may be strided.
        keys: [B, N] float32, contiguous.
        chosen: [B, N - 1] bool: the verified nodes, in order, after each root.
        accept_index: [B, S] int32: packed rows of the accepted path, -1 after it.
        row_starts: [>= B + 1] int32: packed row of each root.
    """
    if not runs_triton(keys):
        return outcome_of_trees_torch(depth, keys, chosen, accept_index, row_starts)
    batch, num_nodes = keys.shape
    told = keys.new_empty((batch, num_nodes - 1, 4))
    _trees_kernel[(batch,)](
        depth, keys, chosen.contiguous(), accept_index, row_starts, told,
        num_nodes, accept_index.shape[1], *depth.stride(),
        BLOCK_N=block_of(num_nodes), num_warps=1 if num_nodes <= 64 else 4,
    )  # fmt: skip
    return told


def outcome_of_trees_torch(
    depth: Tensor, keys: Tensor, chosen: Tensor, accept_index: Tensor, row_starts: Tensor
) -> Tensor:
    """Twin of :func:`outcome_of_trees`."""
    row = row_starts[: len(chosen), None] + chosen.cumsum(dim=1)
    accepted = chosen & (row[:, :, None] == accept_index[:, None, :]).any(dim=2)
    return torch.stack((depth[:, 1:], keys[:, 1:], chosen, accepted), dim=2)  # float32, as keys


@triton.jit(do_not_specialize=["num_nodes", "longest", "row_stride", "node_stride"])
def _trees_kernel(
    depth, keys, chosen, accept_index, row_starts, told,
    num_nodes, longest, row_stride, node_stride, BLOCK_N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    node = 1 + tl.arange(0, BLOCK_N)
    real = node < num_nodes
    draft = request * (num_nodes - 1) + node - 1
    verified = tl.load(chosen + draft, mask=real, other=0).to(tl.int32)
    row = tl.load(row_starts + request) + tl.cumsum(verified, axis=0)
    accepted = tl.zeros([BLOCK_N], dtype=tl.int32)
    for step in range(longest):
        accepted |= (row == tl.load(accept_index + request * longest + step)).to(tl.int32)
    deep = tl.load(depth + request * row_stride + node * node_stride, mask=real)
    key = tl.load(keys + request * num_nodes + node, mask=real)
    here = told + draft * 4
    tl.store(here, deep.to(tl.float32), mask=real)
    tl.store(here + 1, key, mask=real)
    tl.store(here + 2, verified.to(tl.float32), mask=real)
    tl.store(here + 3, (accepted * verified).to(tl.float32), mask=real)

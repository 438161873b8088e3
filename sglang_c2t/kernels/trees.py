"""What is verified of drafted trees: the chosen nodes on other roots, and their links.

::

    drafted  root a b c   b and c below a    chosen b? no: a and c stay
    cut      root a c     parents -1 0 1     first child 1 2 -1     next sibling -1 -1 -1

One launch for what are 60 in torch: it writes 48 bytes a node, so that the launch is what it
costs. Static shapes, no host reads. The kernel and its twin in torch as in
:mod:`sglang_c2t.kernels.rows`. Knows nothing of SGLang.

Legend: B requests, N nodes of a tree, root included.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import block_of, runs_triton
from sglang_c2t.kernels.survival import alike
from sglang_c2t.tree import LinkedTrees, Trees, cut


def cut_and_link(trees: Trees, roots: Tensor, chosen: Tensor | None = None) -> LinkedTrees:
    """The trees on other roots, of whose nodes behind these the chosen ones stay.

    Args:
        trees: As drafted; links may be strided, tokens are contiguous.
        roots: [B] integers, tokens.
        chosen: [B, N - 1] bool, a closed set of live nodes; ``None``: all of them.
    """
    if not runs_triton(trees.tokens):
        return cut_and_link_torch(trees, roots, chosen)
    parents, depth, source = alike(trees.parents, trees.depth, trees.source)
    batch, num_nodes = trees.tokens.shape
    tables = parents.new_empty((6, batch, num_nodes))
    count = parents.new_empty(batch)
    if batch:
        _cut_kernel[(batch,)](
            trees.tokens, parents, depth, source, roots.long(),
            count if chosen is None else chosen.contiguous(), tables, count,
            num_nodes, batch * num_nodes, *parents.stride(),
            ALL=chosen is None, BLOCK_N=block_of(num_nodes),
            num_warps=4 if num_nodes <= 64 else 8,
        )  # fmt: skip
    tokens, parents, depth, source, child, sibling = tables.unbind()
    return LinkedTrees(tokens, parents, depth, count, source, child, sibling)


def cut_and_link_torch(trees: Trees, roots: Tensor, chosen: Tensor | None = None) -> LinkedTrees:
    """Twin of :func:`cut_and_link`."""
    trees = trees.rooted(roots)
    return LinkedTrees.of(trees if chosen is None else cut(trees, chosen))


@triton.jit(do_not_specialize=["num_nodes", "table_size", "row_stride", "node_stride"])
def _cut_kernel(
    tokens, parents, depth, source, roots, chosen, tables, count,
    num_nodes, table_size, row_stride, node_stride,
    ALL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    real = node < num_nodes
    here = request * row_stride + node * node_stride
    parent = tl.load(parents + here, mask=real, other=-1).to(tl.int32)
    live = parent >= 0
    if not ALL:
        drafts = request * (num_nodes - 1) + node - 1
        live = live & (tl.load(chosen + drafts, mask=real & (node > 0), other=0) != 0)
    stays = (node == 0) | live
    number = tl.cumsum(stays.to(tl.int32), axis=0) - 1  # of those that stay
    left = tl.sum(stays.to(tl.int32), axis=0)

    # [N, N], a node before one that is below it or beside it.
    below = live[None, :] & (parent[None, :] == node[:, None])
    beside = (
        (live[:, None] & live[None, :])
        & (parent[:, None] == parent[None, :])
        & (node[:, None] < node[None, :])
    )
    child = tl.min(tl.where(below, number[None, :], BLOCK_N), axis=1)
    sibling = tl.min(tl.where(beside, number[None, :], BLOCK_N), axis=1)
    up = tl.sum(tl.where(below, number[:, None], 0), axis=0)

    token = tl.load(tokens + request * num_nodes + node, mask=real & (node > 0), other=0)
    token = tl.where(node == 0, tl.load(roots + request), token)
    deep = tl.load(depth + here, mask=live, other=0)
    candidate = tl.load(source + here, mask=live, other=-1)

    place = tables + request * num_nodes + number
    tl.store(place, token, mask=stays)
    tl.store(place + table_size, tl.where(live, up, -1).to(tl.int64), mask=stays)
    tl.store(place + 2 * table_size, deep, mask=stays)
    tl.store(place + 3 * table_size, candidate, mask=stays)
    tl.store(place + 4 * table_size, tl.where(child < BLOCK_N, child, -1).to(tl.int64), mask=stays)
    sibling = tl.where(sibling < BLOCK_N, sibling, -1).to(tl.int64)
    tl.store(place + 5 * table_size, sibling, mask=stays)

    behind, place = real & (node >= left), tables + request * num_nodes + node
    none = tl.full([BLOCK_N], -1, tl.int64)
    tl.store(place, none + 1, mask=behind)
    tl.store(place + table_size, none, mask=behind)
    tl.store(place + 2 * table_size, none + 1, mask=behind)
    tl.store(place + 3 * table_size, none, mask=behind)
    tl.store(place + 4 * table_size, none, mask=behind)
    tl.store(place + 5 * table_size, none, mask=behind)
    tl.store(count + request, left.to(tl.int64))

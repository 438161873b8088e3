"""Finished draft trees, and the part of them that is verified.

::

    finish_trees   at the end: the best candidates of each request are its tree
    cut_and_link   the chosen nodes on other roots, with the links of SGLang's verify kernels

    drafted  root a b c   b and c below a    chosen: a and c
    cut      root a c     parents -1 0 1     first child 1 2 -1     next sibling -1 -1 -1

One launch each instead of 70 and 60 in torch. They move less than 100 bytes a node, so launches are
their cost. Static shapes, no host reads. Kernels and twins as in :mod:`sglang_c2t.kernels.rows`.

Legend: B requests, M candidates, N nodes of a tree, root included.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.beams import ordered, without_nan
from sglang_c2t.kernels.rows import (
    aligned_tables,
    block_of,
    runs_triton,
    threshold,
    with_equal_strides,
)
from sglang_c2t.tree import (
    LinkedTrees,
    Trees,
    best_per_request,
    closed_keys,
    cut,
    grow,
    least_on_path,
)

# -- finished trees -----------------------------------------------------------------------


def finish_trees(
    tokens: Tensor, parents: Tensor, keys: Tensor, verify: Tensor | None, *,
    max_nodes: int, max_depth: int,
) -> tuple[Trees, Tensor]:  # fmt: skip
    """Build the trees of the best candidates without roots, and the ranks of their nodes.

    The ranks [B, N] float32 are the least key on each path, inf for roots and -inf for padding.

    Args:
        tokens: [B, M] int64.
        parents: [B, M] int64 candidate numbers, -1 for children of the root.
        keys: [B, M] float32, -inf if a candidate may not enter.
        verify: [B, M] bool: which of the best stay, if the nodes above them do; ``None``: all.
        max_nodes: N.
        max_depth: D, of the deepest candidate.
    """
    if not runs_triton(keys):
        return finish_trees_torch(
            tokens, parents, keys, verify, max_nodes=max_nodes, max_depth=max_depth
        )
    batch, candidates = tokens.shape
    memory, tables = aligned_tables(tokens, 4, batch, max_nodes)
    count, ranks = tokens.new_empty(batch), keys.new_empty((batch, max_nodes))
    number = tokens.new_empty((batch, candidates), dtype=torch.int32)
    if batch:
        _finish_kernel[(batch,)](
            tokens, parents, keys, keys if verify is None else verify, number, memory, count, ranks,
            candidates, max_nodes, memory.stride(0),
            DEPTH=max_depth, ALL=verify is None, BLOCK_M=block_of(candidates),
            BLOCK_N=block_of(max_nodes), num_warps=1 if candidates <= 64 else 4,
        )  # fmt: skip
    made, parents, depth, source = tables
    return Trees(made, parents, depth, count, source), ranks


def finish_trees_torch(
    tokens: Tensor, parents: Tensor, keys: Tensor, verify: Tensor | None, *,
    max_nodes: int, max_depth: int,
) -> tuple[Trees, Tensor]:  # fmt: skip
    """Twin of :func:`finish_trees`."""
    closed = least_on_path(without_nan(keys), parents, max_depth)
    chosen = best_per_request(closed, max_nodes - 1)
    if verify is not None:
        chosen = chosen & (closed_keys(closed, verify, parents, max_depth) > -torch.inf)
    depth, above = torch.ones_like(parents), parents
    for _ in range(max_depth - 1):
        depth = depth + (above >= 0)
        above = torch.where(above >= 0, parents.gather(1, above.clamp(min=0)), above)
    trees = grow(torch.zeros_like(tokens[:, 0]), tokens, parents, depth, chosen, max_nodes)
    ranks = closed.gather(1, trees.source.clamp(min=0)).masked_fill(trees.source < 0, -torch.inf)
    ranks[:, 0] = torch.inf
    return trees, ranks


@triton.jit(do_not_specialize=["candidates", "max_nodes", "table_size"])
def _finish_kernel(
    tokens, parents, keys, verify, number, tables, count, ranks,
    candidates, max_nodes, table_size,
    DEPTH: tl.constexpr, ALL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    this = tl.arange(0, BLOCK_M)
    real = this < candidates
    of = request * candidates
    parent = tl.load(parents + of + this, mask=real, other=-1)
    least = tl.load(keys + of + this, mask=real, other=float("-inf"))
    least = tl.where(least > float("-inf"), least, float("-inf"))  # nan may not enter either
    wanted = real
    if not ALL:
        wanted = wanted & (tl.load(verify + of + this, mask=real, other=0) != 0)
    depth = tl.full([BLOCK_M], 1, tl.int64)
    above = parent
    for _ in range(DEPTH - 1):
        up = above >= 0
        key = tl.load(keys + of + above, mask=up, other=float("inf"))
        least = tl.minimum(least, tl.where(key > float("-inf"), key, float("-inf")))
        if not ALL:
            wanted = wanted & (tl.load(verify + of + above, mask=up, other=1) != 0)
        depth += up.to(tl.int64)
        above = tl.load(parents + of + above, mask=up, other=-1)

    key = ordered(least)
    lowest = threshold(key, max_nodes - 1, 32)
    better = key > lowest
    equal = key == lowest
    left = max_nodes - 1 - tl.sum(better.to(tl.int32))
    chosen = better | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    chosen = chosen & wanted & (key >= 0)
    node = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(number + of + this, node, mask=real)
    tl.debug_barrier()  # other lanes write the parents' numbers
    up = tl.load(number + of + parent, mask=chosen & (parent >= 0), other=0)

    place = tables + request * max_nodes + node
    tl.store(place, tl.load(tokens + of + this, mask=chosen, other=0), mask=chosen)
    tl.store(place + table_size, up.to(tl.int64), mask=chosen)
    tl.store(place + 2 * table_size, depth, mask=chosen)
    tl.store(place + 3 * table_size, this.to(tl.int64), mask=chosen)
    tl.store(ranks + request * max_nodes + node, least, mask=chosen)

    # The root, and padding after the nodes.
    size = tl.sum(chosen.to(tl.int32)) + 1
    slot = tl.arange(0, BLOCK_N)
    rest = (slot < max_nodes) & ((slot == 0) | (slot >= size))
    place = tables + request * max_nodes + slot
    none = tl.full([BLOCK_N], -1, tl.int64)
    tl.store(place, none + 1, mask=rest)
    tl.store(place + table_size, none, mask=rest)
    tl.store(place + 2 * table_size, none + 1, mask=rest)
    tl.store(place + 3 * table_size, none, mask=rest)
    rank = tl.where(slot == 0, float("inf"), float("-inf"))
    tl.store(ranks + request * max_nodes + slot, rank, mask=rest)
    tl.store(count + request, size.to(tl.int64))


# -- verified trees -----------------------------------------------------------------------


def cut_and_link(trees: Trees, roots: Tensor, chosen: Tensor | None = None) -> LinkedTrees:
    """Put trees on new roots, cut to the chosen nodes. Counts are int32.

    Args:
        trees: As drafted; links may be strided, tokens are contiguous.
        roots: [B] integer tokens.
        chosen: [B, N - 1] bool, a closed set of live nodes after the root; ``None``: all of them.
    """
    if not runs_triton(trees.tokens):
        return cut_and_link_torch(trees, roots, chosen)
    parents, depth, source = with_equal_strides(trees.parents, trees.depth, trees.source)
    batch, num_nodes = trees.tokens.shape
    memory, tables = aligned_tables(parents, 6, batch, num_nodes)
    count = parents.new_empty(batch, dtype=torch.int32)
    if batch:
        _cut_kernel[(batch,)](
            trees.tokens, parents, depth, source, roots.long(),
            count if chosen is None else chosen.contiguous(), memory, count,
            num_nodes, memory.stride(0), *parents.stride(),
            ALL=chosen is None, BLOCK_N=block_of(num_nodes),
            num_warps=4 if num_nodes <= 64 else 8,
        )  # fmt: skip
    tokens, parents, depth, source, child, sibling = tables
    return LinkedTrees(tokens, parents, depth, count, source, child, sibling)


def cut_and_link_torch(trees: Trees, roots: Tensor, chosen: Tensor | None = None) -> LinkedTrees:
    """Twin of :func:`cut_and_link`."""
    trees = trees.rooted(roots)
    trees = trees if chosen is None else cut(trees, chosen)
    return LinkedTrees.of(replace(trees, num_nodes=trees.num_nodes.to(torch.int32)))


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
    number = tl.cumsum(stays.to(tl.int32), axis=0) - 1  # of the nodes that stay
    left = tl.sum(stays.to(tl.int32), axis=0)

    # [N, N]: a node before one of its children or later siblings.
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
    tl.store(count + request, left)

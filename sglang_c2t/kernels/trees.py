"""Draft trees while they grow, when they are done, and what is verified of them.

::

    choose_beams   per layer: its best children are the next rows
    finish_trees   at the end: the best candidates of each request are its tree
    cut_and_link   the chosen nodes on other roots, as SGLang's verify kernels walk them

    drafted  root a b c   b and c below a    chosen: a and c
    cut      root a c     parents -1 0 1     first child 1 2 -1     next sibling -1 -1 -1

One launch each for what are 11, 70 and 60 in torch: they move less than 100 bytes a node, so that
launches are what they cost. Static shapes, no host reads. Kernels and their twins in torch as in
:mod:`sglang_c2t.kernels.rows`. Knows nothing of SGLang.

Legend: B requests, W beam rows, K topk, M candidates, N nodes of a tree, root included.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import aligned_tables, alike, block_of, runs_triton, threshold
from sglang_c2t.tree import (
    LinkedTrees,
    Trees,
    best_per_request,
    closed_keys,
    cut,
    grow,
    least_on_path,
)


def _without_nan(values: Tensor) -> Tensor:
    """-inf in its place."""
    return values.masked_fill(~(values > -torch.inf), -torch.inf)


@triton.jit
def _ordered(values):
    """int64 from 0 that orders as floats do; -1 for -inf and nan."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, with which it ties
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values > float("-inf"), ordered.to(tl.int64) + 0x80000000, -1)


# -- while they grow ----------------------------------------------------------------------


class Beams(NamedTuple):
    """The rows that are forwarded next, of every request; dead ones included."""

    tokens: Tensor
    """[B, W] int64."""

    parent_row: Tensor
    """[B, W] int64: row in the layer before (0, the root, for the first)."""

    row_of_batch: Tensor
    """[B, W] int64: the same, counted through the rows of all requests."""

    candidate: Tensor
    """[B, W] int64: number of the node itself."""

    alive: Tensor
    """[B, W] bool: whether anybody reads what this row drafts."""

    joint: Tensor
    """[B, W] float32: product of q along the path."""

    ancestor_rows: Tensor
    """[B, W, d] int64: where its path was forwarded, d layers so far, and where it will be."""


def choose_beams(
    expand: Tensor, tokens: Tensor, joint: Tensor, ancestor_rows: Tensor, *,
    width: int, topk: int, first: int,
) -> Beams:  # fmt: skip
    """The W best children of each request, best first, of equals the first.

    Args:
        expand: [B, n] float32: what they are ranked by, -inf for those that are dead; n = rows of
            the layer times K.
        tokens: [B, n] int64.
        joint: [B, n] float32.
        ancestor_rows: [B, rows, d] int64 of the layer's own rows.
        width: W <= n.
        topk: K.
        first: Number of the layer's first candidate.
    """
    if not runs_triton(expand):
        return choose_beams_torch(
            expand, tokens, joint, ancestor_rows, width=width, topk=topk, first=first
        )
    batch, children = expand.shape
    rows, depth = ancestor_rows.shape[1:]
    memory, beams = _empty_beams(tokens, batch, width, depth + 1)
    if batch:
        _beams_kernel[(batch,)](
            expand.contiguous(), tokens.contiguous(), joint.contiguous(),
            ancestor_rows.contiguous(), memory, *beams[4:],
            children, memory.stride(0), width, topk, first, rows, depth,
            BLOCK=block_of(children), BLOCK_D=block_of(depth), num_warps=_warps(children),
        )  # fmt: skip
    return beams


def _empty_beams(like: Tensor, batch: int, width: int, depth: int) -> tuple[Tensor, Beams]:
    """Room for them, with the memory that their numbers share."""
    memory, (tokens, parent_row, row_of_batch, candidate) = aligned_tables(like, 4, batch, width)
    alive = like.new_empty((batch, width), dtype=torch.bool)
    joint = like.new_empty((batch, width), dtype=torch.float32)
    ancestor_rows = like.new_empty((batch, width, depth))
    return memory, Beams(tokens, parent_row, row_of_batch, candidate, alive, joint, ancestor_rows)


def _warps(children: int) -> int:
    """For all pairs of children of a request."""
    return 1 if children <= 16 else 4 if children <= 64 else 8


def choose_beams_torch(
    expand: Tensor, tokens: Tensor, joint: Tensor, ancestor_rows: Tensor, *,
    width: int, topk: int, first: int,
) -> Beams:  # fmt: skip
    """Twin of :func:`choose_beams`."""
    expand = _without_nan(expand)
    best = expand.argsort(dim=1, descending=True, stable=True)[:, :width]  # [B, W]
    row = best // topk
    rows, depth = ancestor_rows.shape[1:]
    above = ancestor_rows.gather(1, row[:, :, None].expand(-1, -1, depth))
    own = torch.arange(width, device=expand.device).expand_as(row)
    return Beams(
        tokens=tokens.gather(1, best),
        parent_row=row,
        row_of_batch=row + torch.arange(len(row), device=row.device)[:, None] * rows,
        candidate=best + first,
        alive=expand.gather(1, best) > -torch.inf,
        joint=joint.gather(1, best),
        ancestor_rows=torch.cat((above, own[:, :, None]), dim=2),
    )


@triton.jit(do_not_specialize=[
    "children", "table_size", "width", "topk", "first", "rows", "depth",
])  # fmt: skip
def _beams_kernel(
    expand, tokens, joint, ancestor_rows, numbers, alive, joint_out, ancestors_out,
    children, table_size, width, topk, first, rows, depth,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, BLOCK)
    real = child < children
    here = request * children + child
    values = tl.load(expand + here, mask=real, other=float("-inf"))
    key = tl.where(real, _ordered(values), -2)
    place = _place(key, child)
    token = tl.load(tokens + here, mask=real & (place < width), other=0)
    product = tl.load(joint + here, mask=real & (place < width), other=0.0)
    _store_beams(
        request, child, place, real & (place < width), key >= 0, token, product, ancestor_rows,
        numbers, alive, joint_out, ancestors_out, table_size, width, topk, first, rows, depth,
        BLOCK_D=BLOCK_D,
    )  # fmt: skip


@triton.jit
def _place(key, child):
    """Where each child comes among all of its request, of equals the first first."""
    better = (key[None, :] > key[:, None]) | (
        (key[None, :] == key[:, None]) & (child[None, :] < child[:, None])
    )
    return tl.sum(better.to(tl.int32), axis=1)


@triton.jit
def _store_beams(
    request, child, place, stays, lives, token, joint, ancestor_rows,
    numbers, alive, joint_out, ancestors_out, table_size, width, topk, first, rows, depth,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The children that stay become :class:`Beams`, each at its place."""
    row = child // topk
    out = request * width + place
    tl.store(numbers + out, token, mask=stays)
    tl.store(numbers + table_size + out, row.to(tl.int64), mask=stays)
    tl.store(numbers + 2 * table_size + out, request * rows + row, mask=stays)
    tl.store(numbers + 3 * table_size + out, (child + first).to(tl.int64), mask=stays)
    tl.store(alive + out, lives, mask=stays)
    tl.store(joint_out + out, joint, mask=stays)
    step = tl.arange(0, BLOCK_D)
    inside = stays[:, None] & (step < depth)[None, :]
    above = (request * rows + row)[:, None] * depth + step[None, :]
    path = tl.load(ancestor_rows + above, mask=inside, other=0)
    tl.store(ancestors_out + out[:, None] * (depth + 1) + step[None, :], path, mask=inside)
    tl.store(ancestors_out + out * (depth + 1) + depth, place.to(tl.int64), mask=stays)


class Rule(NamedTuple):
    """How a layer's children enter their tree and go on, see :mod:`sglang_c2t.policies`."""

    kind: str
    """By a gate's confidence: "gated" the confident ones enter and go on, "planned" all do. By the
    joint probability: "joint" all do, "filtered" of these the confident ones are verified, "width"
    as many of a row as its entropy says, which is the confidence here, "fork" the first ones, row
    by row. "static" says of each child of a layer whether it does."""

    limit: int = 0
    """How many of a request's layer may enter where they are gated, or of the first layer of a
    fork; 0: any number."""


class Candidates(NamedTuple):
    """What all layers of a step have offered, [B, M] each."""

    tokens: Tensor
    """int64."""

    parents: Tensor
    """int64: candidate numbers, -1 for children of the root."""

    keys: Tensor
    """float32: what they are ranked by, -inf where one may not enter."""

    verify: Tensor
    """bool: which of the best are kept. Written where the rule is "filtered"."""

    @classmethod
    def empty(cls, batch: int, count: int, device: torch.device | str) -> Candidates:
        """Room for M of each request."""
        kinds = torch.int64, torch.int64, torch.float32, torch.bool
        return cls(*(torch.empty((batch, count), dtype=kind, device=device) for kind in kinds))


def grow_layer(
    tokens: Tensor, prob: Tensor, confidence: Tensor, beams: Beams | None, into: Candidates, *,
    rule: Rule, beta: Tensor, whole: Tensor | None, width: int, topk: int, first: int,
    expands: bool, template: Tensor | None = None,
) -> Beams:  # fmt: skip
    """What :class:`~sglang_c2t.draft.growth.TreeGrowth` does with a layer in torch, in one launch:
    the next beams, and what is written ``into`` its columns. For CUDA tensors.

    Args:
        tokens: [B, n] int64, n = W * K children of the layer's rows, by falling probability.
        prob: [B, n] float32, q(child | path).
        confidence: [B, n] float32; may be strided.
        beams: The rows that offered them; ``None``: the root did.
        into: Of all layers.
        rule: What enters and what goes on.
        beta: float32, the first number: the least confidence that passes.
        whole: [B] bool: requests whose rule is "joint" all the same; ``None``: nobody's.
        width: Rows of the layer to come.
        topk: K.
        first: Number of the layer's first candidate.
        expands: Whether any row of the layer to come is alive.
        template: [2, W, K] float32 of a rule that is "static": a child's key, and what is forwarded
            next.
    """
    batch, children = tokens.shape
    rows, depth = (1, 0) if beams is None else beams.ancestor_rows.shape[1:]
    width = min(width, children)
    memory, made = _empty_beams(tokens, batch, width, depth + 1)
    above = made if beams is None else beams  # nothing is read of the root
    if batch:
        _grow_kernel[(batch,)](
            tokens.contiguous(), prob.float().contiguous(), confidence, *confidence.stride(), beta,
            beta if whole is None else whole, beta if template is None else template,
            above.candidate, above.alive, above.joint, above.ancestor_rows, *into,
            into.tokens.shape[1], memory, *made[4:],
            children, memory.stride(0), width, topk, first, rows, depth, rule.limit, int(expands),
            KIND=rule.kind, ROOT=beams is None, ANY_WHOLE=whole is not None,
            BLOCK=block_of(children), BLOCK_D=block_of(depth), num_warps=_warps(children),
        )  # fmt: skip
    return made


@triton.jit(
    do_not_specialize=[
        "row_stride", "child_stride", "candidates", "children", "table_size", "width", "topk",
        "first", "rows", "depth", "limit", "expands",
    ],
    do_not_specialize_on_alignment=["confidence", "beta"],
)  # fmt: skip
def _grow_kernel(
    tokens, prob, confidence, row_stride, child_stride, beta, whole, template, above, above_alive,
    above_joint, ancestor_rows, all_tokens, all_parents, all_keys, all_verify, candidates,
    numbers, alive, joint_out, ancestors_out,
    children, table_size, width, topk, first, rows, depth, limit, expands,
    KIND: tl.constexpr, ROOT: tl.constexpr, ANY_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, BLOCK)
    real = child < children
    here = request * children + child
    of_row = request * rows + child // topk
    token = tl.load(tokens + here, mask=real, other=0)
    lives = real
    joint = tl.load(prob + here, mask=real, other=0.0)
    parent = tl.full([BLOCK], -1, tl.int64)
    if not ROOT:
        lives = tl.load(above_alive + of_row, mask=real, other=0) != 0
        joint = joint * tl.load(above_joint + of_row, mask=real, other=0.0)
        parent = tl.load(above + of_row, mask=real, other=0)
    sure = tl.load(confidence + request * row_stride + child * child_stride, mask=real, other=0.0)
    passes = lives & (sure >= tl.load(beta))
    rank = child % topk
    key = joint  # in its tree
    if KIND == "gated":
        key = tl.where(passes, sure, float("-inf"))
    if KIND == "planned":
        key = tl.where(sure > float("-inf"), sure, 0.0)  # not nan
    if KIND == "width":
        wide = tl.minimum(tl.ceil(sure * 4), 7.0)
        wide = tl.where(sure < 1, tl.where(sure >= 0.02, 2.0, 1.0), wide)
        key = tl.where((sure <= tl.load(beta)) & (rank < wide), joint, float("-inf"))
    goes = key  # what is forwarded next
    if KIND == "fork":
        inside = (limit == 0) | (rank < limit) if ROOT else rank == 0
        key = tl.where(inside, joint, float("-inf"))
        goes = -child.to(tl.float32)
    if KIND == "static":
        key = tl.load(template + child, mask=real, other=float("-inf"))
        goes = tl.load(template + children + child, mask=real, other=float("-inf"))
    as_it_is = tl.zeros([], dtype=tl.int1)
    if ANY_WHOLE:
        as_it_is = tl.load(whole + request) != 0
        key = tl.where(as_it_is, joint, key)
        goes = tl.where(as_it_is, joint, goes)
        passes = passes | as_it_is
    key = tl.where(lives, key, float("-inf"))
    order = tl.where(key > float("-inf"), _ordered(goes), -1)
    order = tl.where(real, order, -2)
    place = _place(order, child)
    if KIND == "gated":
        beyond = (limit > 0) & (place >= limit) & (as_it_is == 0)
        key = tl.where(beyond, float("-inf"), key)
        order = tl.where(beyond, -1, order)

    out = request * candidates + first + child
    tl.store(all_tokens + out, token, mask=real)
    tl.store(all_parents + out, parent, mask=real)
    tl.store(all_keys + out, key, mask=real)
    if KIND == "filtered":
        tl.store(all_verify + out, passes, mask=real)
    _store_beams(
        request, child, place, real & (place < width), (order >= 0) & (expands != 0), token, joint,
        ancestor_rows, numbers, alive, joint_out, ancestors_out, table_size, width, topk, first,
        rows, depth, BLOCK_D=BLOCK_D,
    )  # fmt: skip


# -- when they are done -------------------------------------------------------------------


def finish_trees(
    tokens: Tensor, parents: Tensor, keys: Tensor, verify: Tensor | None, *,
    max_nodes: int, max_depth: int,
) -> tuple[Trees, Tensor]:  # fmt: skip
    """The trees of the best candidates, roots not filled in, and what their nodes are ranked by:
    [B, N] float32, the least key on each path, inf for roots and -inf for padding.

    Args:
        tokens: [B, M] int64.
        parents: [B, M] int64 candidate numbers, -1 for children of the root.
        keys: [B, M] float32, -inf where a candidate may not enter.
        verify: [B, M] bool: which of the best are kept, where nodes above them are; ``None``: all.
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
    closed = least_on_path(_without_nan(keys), parents, max_depth)
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
    least = tl.where(least > float("-inf"), least, float("-inf"))  # nor may nan enter
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

    key = _ordered(least)
    lowest = threshold(key, max_nodes - 1, 32)
    better = key > lowest
    equal = key == lowest
    left = max_nodes - 1 - tl.sum(better.to(tl.int32))
    chosen = better | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    chosen = chosen & wanted & (key >= 0)
    node = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(number + of + this, node, mask=real)
    tl.debug_barrier()  # parents' numbers are other lanes'
    up = tl.load(number + of + parent, mask=chosen & (parent >= 0), other=0)

    place = tables + request * max_nodes + node
    tl.store(place, tl.load(tokens + of + this, mask=chosen, other=0), mask=chosen)
    tl.store(place + table_size, up.to(tl.int64), mask=chosen)
    tl.store(place + 2 * table_size, depth, mask=chosen)
    tl.store(place + 3 * table_size, this.to(tl.int64), mask=chosen)
    tl.store(ranks + request * max_nodes + node, least, mask=chosen)

    # The root, and padding behind the nodes.
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


# -- what is verified ---------------------------------------------------------------------


def cut_and_link(trees: Trees, roots: Tensor, chosen: Tensor | None = None) -> LinkedTrees:
    """The trees on other roots, of whose nodes behind these the chosen ones stay. Counted in int32.

    Args:
        trees: As drafted; links may be strided, tokens are contiguous.
        roots: [B] integers, tokens.
        chosen: [B, N - 1] bool, a closed set of live nodes; ``None``: all of them.
    """
    if not runs_triton(trees.tokens):
        return cut_and_link_torch(trees, roots, chosen)
    parents, depth, source = alike(trees.parents, trees.depth, trees.source)
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
    tl.store(count + request, left)

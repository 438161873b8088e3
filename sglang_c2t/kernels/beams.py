"""Beams of growing draft trees: per layer, the best children become the next rows.

::

    choose_beams   ranks a layer's children and makes the best ones the next rows
    grow_layer     first computes a policy's keys, all in one launch

Static shapes, no host reads. Kernels and twins as in :mod:`sglang_c2t.kernels.rows`.

Legend: B requests, W beam rows, K topk, M candidates, n = W * K children of a layer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import aligned_tables, block_of, runs_triton


def without_nan(values: Tensor) -> Tensor:
    """Replace nan by -inf."""
    return values.masked_fill(~(values > -torch.inf), -torch.inf)


@triton.jit
def ordered(values):
    """Map floats to int64 >= 0 of the same order; -inf and nan to -1."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values > float("-inf"), ordered.to(tl.int64) + 0x80000000, -1)


class Beams(NamedTuple):
    """The rows of the next forward, of every request; dead ones included."""

    tokens: Tensor
    """[B, W] int64."""

    parent_row: Tensor
    """[B, W] int64: row in the previous layer; 0, the root, for the first layer."""

    row_of_batch: Tensor
    """[B, W] int64: the same row, counted over all requests."""

    candidate: Tensor
    """[B, W] int64: candidate number of the node."""

    alive: Tensor
    """[B, W] bool: whether the drafts of this row are used."""

    joint: Tensor
    """[B, W] float32: product of q along the path."""

    ancestor_rows: Tensor
    """[B, W, d] int64: rows in which its path was forwarded, and its own next row."""


def choose_beams(
    expand: Tensor, tokens: Tensor, joint: Tensor, ancestor_rows: Tensor, *,
    width: int, topk: int, first: int,
) -> Beams:  # fmt: skip
    """Return the W best children of each request, best first, of equal ones the first.

    Args:
        expand: [B, n] float32: their rank, -inf for dead ones; n = rows of the layer times K.
        tokens: [B, n] int64.
        joint: [B, n] float32.
        ancestor_rows: [B, rows, d] int64 of the layer's rows.
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
    """Allocate beams; returns also the memory that their integer tables share."""
    memory, (tokens, parent_row, row_of_batch, candidate) = aligned_tables(like, 4, batch, width)
    alive = like.new_empty((batch, width), dtype=torch.bool)
    joint = like.new_empty((batch, width), dtype=torch.float32)
    ancestor_rows = like.new_empty((batch, width, depth))
    return memory, Beams(tokens, parent_row, row_of_batch, candidate, alive, joint, ancestor_rows)


def _warps(children: int) -> int:
    """Return the warps for all pairs of a request's children."""
    return 1 if children <= 16 else 4 if children <= 64 else 8


def choose_beams_torch(
    expand: Tensor, tokens: Tensor, joint: Tensor, ancestor_rows: Tensor, *,
    width: int, topk: int, first: int,
) -> Beams:  # fmt: skip
    """Twin of :func:`choose_beams`."""
    expand = without_nan(expand)
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
    key = tl.where(real, ordered(values), -2)
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
    """Return the rank of each child in its request, of equal ones the first first."""
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
    """Write the children that stay to :class:`Beams`, each at its rank."""
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
    """How a layer's children enter their tree and are forwarded; see :mod:`sglang_c2t.policies`."""

    kind: str
    """``gated``: children whose confidence passes enter and are forwarded. ``planned``: all do,
    ranked by confidence. ``joint``: all do, ranked by joint probability. ``filtered``: as
    ``joint``, and the target verifies the tree's nodes that pass.
    """

    limit: int = 0
    """Most nodes of a request's layer if ``gated``; 0: no limit."""


class Candidates(NamedTuple):
    """Candidates of all layers of a step, [B, M] each."""

    tokens: Tensor
    """int64."""

    parents: Tensor
    """int64: candidate numbers, -1 for children of the root."""

    keys: Tensor
    """float32: their rank, -inf if they may not enter."""

    verify: Tensor
    """bool: which of the best nodes stay. Written by rule ``filtered`` only."""

    @classmethod
    def empty(cls, batch: int, count: int, device: torch.device | str) -> Candidates:
        """Allocate M candidates per request."""
        kinds = torch.int64, torch.int64, torch.float32, torch.bool
        return cls(*(torch.empty((batch, count), dtype=kind, device=device) for kind in kinds))


def grow_layer(
    tokens: Tensor, prob: Tensor, confidence: Tensor, beams: Beams | None, into: Candidates, *,
    rule: Rule, beta: Tensor, whole: Tensor | None, width: int, topk: int, first: int,
    expands: bool,
) -> Beams:  # fmt: skip
    """Grow a layer in one launch, as :class:`~sglang_c2t.draft.growth.TreeGrowth` does in torch.

    For CUDA tensors. It returns the next beams and writes the candidates' columns ``into``.

    Args:
        tokens: [B, n] int64, n = W * K children of the layer's rows, by falling probability.
        prob: [B, n] float32, q(child | path).
        confidence: [B, n] float32; may be strided.
        beams: The rows that offered them; ``None``: the root.
        into: Candidates of all layers.
        rule: Which children enter and are forwarded.
        beta: float32, first element: the least confidence that passes.
        whole: [B] bool: requests with rule ``joint`` in any case; ``None``: none.
        width: Rows of the next layer.
        topk: K.
        first: Number of the layer's first candidate.
        expands: Whether any row of the next layer is alive.
    """
    batch, children = tokens.shape
    rows, depth = (1, 0) if beams is None else beams.ancestor_rows.shape[1:]
    width = min(width, children)
    memory, made = _empty_beams(tokens, batch, width, depth + 1)
    above = made if beams is None else beams  # the kernel reads nothing of the root
    if batch:
        _grow_kernel[(batch,)](
            tokens.contiguous(), prob.float().contiguous(), confidence, *confidence.stride(), beta,
            beta if whole is None else whole,
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
    tokens, prob, confidence, row_stride, child_stride, beta, whole, above, above_alive,
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
    key = joint  # in its tree
    if KIND == "gated":
        key = tl.where(passes, sure, float("-inf"))
    if KIND == "planned":
        key = tl.where(sure > float("-inf"), sure, 0.0)  # not nan
    as_it_is = tl.zeros([], dtype=tl.int1)
    if ANY_WHOLE:
        as_it_is = tl.load(whole + request) != 0
        key = tl.where(as_it_is, joint, key)
        passes = passes | as_it_is
    key = tl.where(lives, key, float("-inf"))
    order = tl.where(real, ordered(key), -2)
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

"""The accepted path of every request, from the tokens that the target wants, in one launch.

From the root on, a path goes to the child whose token is the one that the target wants behind this
node, of equals the first, and ends where there is none::

    chain   drafts a b c    wanted a b x .    path root a b, tokens a b x

Whether drafts are accepted so by argmax or by sampling: exact for both (see ``srt/verify/``).
Static shapes, no host reads, 32 N bytes a request. Kernel and twin as in
:mod:`sglang_c2t.kernels.rows`. Knows nothing of SGLang.

Legend: B requests, N most nodes of a request, R packed rows, S nodes of the longest path.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_c2t.kernels.rows import block_of, runs_triton


class AcceptedPaths(NamedTuple):
    """Roots included; what a chain's rows are called is a tree's packed row."""

    predict: Tensor
    """[B * N] int32: the target's token at each row of a path, by its number; else 0."""

    accept_lens: Tensor
    """[B] int32: nodes of each path."""

    accept_index: Tensor
    """[B, S] int32: the numbers of their rows, -1 behind the path."""

    written: Tensor
    """[B * S] int64: KV slots that the nodes were written to; behind the path 0, which is the
    padding slot."""

    front: Tensor
    """[B * S] int64: the first slots of the window, where they belong; else 0."""


def accept_paths(
    wanted: Tensor,
    draft_token: Tensor,
    num_rows: Tensor,
    row_starts: Tensor,
    window: Tensor,
    parents: Tensor | None = None,
    *,
    longest: int,
    most: int,
) -> AcceptedPaths:
    """The longest path of each request along which drafts are wanted.

    Args:
        wanted: [R] int64: the target's token behind each packed row.
        draft_token: [B * N] int64.
        num_rows: [B] int32: verified rows of each request.
        row_starts: [>= B + 1] int32: packed place of each request's first.
        window: [B, W] int64: KV slots of its rows, W >= N and W >= S.
        parents: [B, N] int64 of trees, see :class:`~sglang_c2t.tree.Trees`: rows have their packed
            numbers. ``None``: chains, whose rows have their strided ones.
        longest: S.
        most: Nodes that a path may have, at most S; 1 accepts no draft.
    """
    tables = wanted, draft_token, num_rows, row_starts, window
    if not runs_triton(wanted):
        return accept_paths_numpy(*tables, parents, longest=longest, most=most)
    batch, width = len(num_rows), draft_token.numel() // max(len(num_rows), 1)
    predict = num_rows.new_empty(batch * width, dtype=torch.int32)
    lens = num_rows.new_empty(batch, dtype=torch.int32)
    index = num_rows.new_empty((batch, longest), dtype=torch.int32)
    written, front = (window.new_empty(batch * longest) for _ in range(2))
    if batch:
        _accept_kernel[(batch + 1,)](
            *tables, draft_token if parents is None else parents.contiguous(),
            predict, lens, index, written, front,
            batch, width, window.shape[1], longest, most,
            TREES=parents is not None, BLOCK_N=block_of(max(width, longest)),
        )  # fmt: skip
    return AcceptedPaths(predict, lens, index, written, front)


@triton.jit(do_not_specialize=["batch", "width", "places", "longest", "most"])
def _accept_kernel(
    wanted, draft_token, num_rows, row_starts, window, parents,
    predict, accept_lens, accept_index, written, front,
    batch, width, places, longest, most,
    TREES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    this = tl.program_id(0)
    lane = tl.arange(0, BLOCK_N)
    if this == batch:  # numbers that no packed row has
        if TREES:
            for begin in range(tl.load(row_starts + batch), batch * width, BLOCK_N):
                tl.store(predict + begin + lane, 0, mask=begin + lane < batch * width)
    else:
        rows = tl.load(num_rows + this)
        start = tl.load(row_starts + this)
        here = this.to(tl.int64) * width + lane
        draft = (lane > 0) & (lane < rows)
        above = lane - 1
        if TREES:
            above = tl.load(parents + here, mask=draft, other=-1).to(tl.int32)
        draft = draft & (above >= 0)
        token = tl.load(draft_token + here, mask=draft, other=-1)
        matches = draft & (token == tl.load(wanted + start + above, mask=draft, other=-2))
        node, nodes = 0, 0
        on_path = lane < 0
        path = tl.zeros([BLOCK_N], dtype=tl.int32)  # its nodes, in order
        for _ in range(most):
            if node < BLOCK_N:
                on_path = on_path | (lane == node)
                path = tl.where(lane == nodes, node, path)
                nodes += 1
                node = tl.min(tl.where(matches & (above == node), lane, BLOCK_N))

        number = start if TREES else this * width
        token = tl.load(wanted + start + lane, mask=on_path, other=0).to(tl.int32)
        own = lane < (rows if TREES else width)
        tl.store(predict + number + lane, token, mask=own)
        tl.store(accept_lens + this, nodes)
        accepted, inside = lane < nodes, lane < longest
        at = this.to(tl.int64) * longest + lane
        tl.store(accept_index + at, tl.where(accepted, number + path, -1), mask=inside)
        slots = window + this.to(tl.int64) * places
        tl.store(written + at, tl.load(slots + path, mask=accepted, other=0), mask=inside)
        tl.store(front + at, tl.load(slots + lane, mask=accepted, other=0), mask=inside)


def accept_paths_numpy(
    wanted: Tensor,
    draft_token: Tensor,
    num_rows: Tensor,
    row_starts: Tensor,
    window: Tensor,
    parents: Tensor | None = None,
    *,
    longest: int,
    most: int,
) -> AcceptedPaths:
    """Twin of :func:`accept_paths`. In numpy as that of ``layout.py``."""
    device, batch = wanted.device, len(num_rows)
    width = draft_token.numel() // batch if batch else 1
    target, drafts, lens, starts, places = (
        table.cpu().numpy() for table in (wanted, draft_token, num_rows, row_starts, window)
    )
    starts, node = starts[:batch, None].astype(np.int64), np.arange(width)
    above = node - 1 if parents is None else parents.cpu().numpy()
    draft = (node > 0) & (node < lens[:, None]) & (above >= 0)
    of_parent = target[np.where(draft, starts + above, 0)]
    matches = draft & (drafts.reshape(batch, width) == of_parent)

    path = np.full((batch, longest), width)  # behind its end no node
    here = np.zeros(batch, dtype=np.int64)
    for place in range(most):
        path[:, place] = here
        here = np.where(matches & (above == here[:, None]), node, width).min(axis=1, initial=width)
    accepted = path < width
    path[~accepted] = 0
    number = path + (np.arange(batch)[:, None] * width if parents is None else starts)

    predict = np.zeros(batch * width, dtype=np.int32)
    predict[number[accepted]] = target[(starts + path)[accepted]]
    return AcceptedPaths(
        *(
            torch.from_numpy(found).to(device)
            for found in (
                predict,
                accepted.sum(axis=1, dtype=np.int32),
                np.where(accepted, number, -1).astype(np.int32),
                np.where(accepted, np.take_along_axis(places, path, axis=1), 0).ravel(),
                np.where(accepted, places[:, :longest], 0).ravel(),
            )
        )
    )

"""The accepted path of every request, from the target's tokens, in one launch.

From the root on, a path goes to the first child whose token is the target's token after this node.
It ends at a node without such a child::

    chain   drafts a b c    wanted a b x .    path root a b, tokens a b x

This acceptance is exact for argmax and for sampling (see ``srt/verify/``). Static shapes, no host
reads, 32 N bytes a request. Kernel and twin as in :mod:`sglang_c2t.kernels.rows`.

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
    """Paths, roots included. Row numbers are strided for chains and packed for trees."""

    predict: Tensor
    """[B * N] int32: the target's token at each row of a path, by row number; otherwise 0."""

    accept_lens: Tensor
    """[B] int32: nodes of each path."""

    accept_index: Tensor
    """[B, S] int32: the numbers of their rows, -1 after the path."""

    written: Tensor
    """[B * S] int64: KV slots of the nodes; after the path 0, SGLang's padding slot."""

    front: Tensor
    """[B * S] int64: the first slots of the window, where the nodes belong; otherwise 0."""


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
    """Return the longest path of each request along which drafts equal the target's tokens.

    Args:
        wanted: [R] int64: the target's token after each packed row.
        draft_token: [B * N] int64.
        num_rows: [B] int32: verified rows of each request.
        row_starts: [>= B + 1] int32: packed index of each request's first row.
        window: [B, W] int64: KV slots of its rows, W >= N and W >= S.
        parents: [B, N] int64 of trees, see :class:`~sglang_c2t.tree.Trees`: rows have packed
            numbers. ``None``: chains, whose rows have strided numbers.
        longest: S.
        most: Most nodes of a path, at most S; 1 accepts no draft.
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
    if this == batch:  # row numbers without a packed row
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
    """Twin of :func:`accept_paths`, in numpy as in ``layout.py``."""
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

    path = np.full((batch, longest), width)  # padded with no node
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

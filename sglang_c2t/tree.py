"""Batches of draft trees of different shape and size: choose nodes, link them, pack rows.

A request's *candidates* are all nodes that its draft has proposed, parents before children. The
surviving ones and the root are its *tree*. Node 0 is the root (the committed bonus token); the
other nodes keep the order of their candidates. The trees of a batch are padded to N nodes for the
acceptance kernels, and packed, live nodes only, for the target::

    request 0   root a b c    a -> b     num_nodes 4    packed rows 0 1 2 3
    request 1   root x        x          num_nodes 2    packed rows 4 5

A tree must be *closed*: it holds all ancestors of its nodes. Acceptance starts at the root, and
SGLang's builder reads out of bounds otherwise. Trees are closed by construction here: nodes are
ranked by the least key on their path, ties in candidate order, so no child outranks an ancestor.

Pure torch, static shapes, no host reads unless stated; it knows nothing of SGLang or policies.

Legend: B requests, M candidates a request, N nodes a tree (root included), R live rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORD_BITS = 64


@dataclass(frozen=True)
class Trees:
    """A batch of trees, padded to N nodes."""

    tokens: Tensor
    """[B, N] int64, root first; 0 after the live nodes."""

    parents: Tensor
    """[B, N] int64: node number of the parent; -1 for the root and for padding."""

    depth: Tensor
    """[B, N] int64: 0 for the root and for padding."""

    num_nodes: Tensor
    """[B] integers in [1, N]: live nodes, root included."""

    source: Tensor
    """[B, N] int64: the node's candidate; -1 for the root and for padding."""

    def positions(self, seq_lens: Tensor) -> Tensor:
        """[B, N] int64: position in the sequence; ``seq_lens`` [B] does not count the root."""
        return seq_lens[:, None] + self.depth

    def retrieve_index(self, num_rows: Tensor | None = None) -> Tensor:
        """[B, N] int64: row of every node in the target's forward, 0 for padding. Each request has
        ``num_rows`` [B] rows there, by default its live nodes. No link reaches padding.
        """
        num_rows = self.num_nodes if num_rows is None else num_rows
        node = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        first_row = num_rows.cumsum(0) - num_rows  # [B]
        return (first_row[:, None] + node).masked_fill(node >= self.num_nodes[:, None], 0)

    def rooted(self, roots: Tensor) -> Trees:
        """Return the same trees on other roots [B]."""
        return replace(self, tokens=torch.cat((roots.long()[:, None], self.tokens[:, 1:]), dim=1))


@dataclass(frozen=True)
class LinkedTrees(Trees):
    """Trees with the links of SGLang's verify kernels."""

    first_child: Tensor
    """[B, N] int64: a node's first child, -1 without one."""

    next_sibling: Tensor
    """[B, N] int64: the next child of its parent, -1 without one."""

    @classmethod
    def of(cls, trees: Trees) -> LinkedTrees:
        """Add the links to trees."""
        return cls(**vars(trees), **dict(zip(LINKS, child_links(trees.parents), strict=True)))

    def agreed(self, agree: Callable[[Tensor], Tensor]) -> LinkedTrees:
        """Return rank 0's trees; ``agree`` makes an int64 tensor rank 0's."""
        same = agree(torch.stack([getattr(self, name) for name in (*PLANES, *LINKS)]))
        tables = dict(zip((*PLANES, *LINKS), same.unbind(), strict=True))
        return LinkedTrees(num_nodes=(tables["parents"] >= 0).sum(dim=1) + 1, **tables)


PLANES = ("tokens", "parents", "depth", "source")
LINKS = ("first_child", "next_sibling")


def least_on_path(values: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """[B, M]: the least of ``values`` [B, M] among a candidate and all its ancestors. ``parents``
    [B, M] int64, -1 for children of the root. Chain 0.9, 0.2, 0.7 -> 0.9, 0.2, 0.2.
    """
    least, above = values, parents
    for _ in range((max_depth - 1).bit_length()):  # k rounds reach 2**k - 1 ancestors
        over = least.gather(1, above.clamp(min=0))
        least = torch.where(above >= 0, torch.minimum(least, over), least)
        above = torch.where(above >= 0, above.gather(1, above.clamp(min=0)), above)
    return least


def closed_keys(key: Tensor, keep: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """[B, M] float32: ranks of candidates; -inf if a node on the path was dropped. ``key`` [B, M]
    is a candidate's own rank and must not be nan. ``keep`` [B, M] bool is the policy's decision.
    """
    return least_on_path(key.float().masked_fill(~keep, -torch.inf), parents, max_depth)


def best_per_request(closed: Tensor, max_drafts: int) -> Tensor:
    """[B, M] bool: up to ``max_drafts`` best candidates of each request; a closed set. ``closed``
    are :func:`closed_keys`.
    """
    return _among_best(closed, max_drafts) & (closed > -torch.inf)


def best_of_batch(closed: Tensor, chosen: Tensor, max_drafts: int) -> Tensor:
    """[B, M] bool: up to ``max_drafts`` best of the ``chosen`` [B, M] over the whole batch. It
    bounds the rows of one target forward. Ties go by candidate number first, so that requests share
    them; the set stays closed.
    """
    flat = closed.masked_fill(~chosen, -torch.inf).T.reshape(1, -1)  # [1, M * B]
    best = _among_best(flat, max_drafts) & (flat > -torch.inf)
    return best.view(closed.shape[1], closed.shape[0]).T


def _among_best(values: Tensor, count: int) -> Tensor:
    """[B, M] bool: the ``count`` largest of each row; of equal ones the first."""
    order = values.argsort(dim=1, descending=True, stable=True)
    best = torch.arange(values.shape[1], device=values.device) < count
    return torch.zeros_like(values, dtype=torch.bool).scatter(1, order, best.expand_as(order))


def grow(
    roots: Tensor, tokens: Tensor, parents: Tensor, depth: Tensor, chosen: Tensor, max_nodes: int
) -> Trees:
    """Build the trees of the chosen candidates.

    Args:
        roots: [B] int64 tokens.
        tokens: [B, M] int64.
        parents: [B, M] int64 candidate numbers, -1 for children of the root.
        depth: [B, M] int64, 1 for children of the root.
        chosen: [B, M] bool, closed, at most ``max_nodes`` - 1 a request.
        max_nodes: N.
    """
    batch = tokens.shape[0]
    # A candidate's node number; the others go to a column that is cut off.
    number = torch.where(chosen, chosen.long().cumsum(1), max_nodes)  # [B, M]
    of_parent = torch.where(parents < 0, 0, number.gather(1, parents.clamp(min=0)))

    def table(values: Tensor, root: Tensor | int, pad: int) -> Tensor:
        full = values.new_full((batch, max_nodes + 1), pad)
        full[:, 0] = root
        full = full.scatter(1, number, torch.where(chosen, values, pad))
        return full[:, :max_nodes].contiguous()  # SGLang's kernels ignore strides

    candidate = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return Trees(
        tokens=table(tokens, roots, 0),
        parents=table(of_parent, -1, -1),
        depth=table(depth, 0, 0),
        num_nodes=chosen.sum(dim=1) + 1,
        source=table(candidate, -1, -1),
    )


def within_budget(trees: Trees, keys: Tensor, max_rows: int) -> Tensor:
    """[B, N - 1] bool: the best nodes after the roots, within ``max_rows`` of the whole batch.
    ``keys`` [B, N] are closed keys of the nodes. Roots count and always stay, so a batch of more
    than ``max_rows`` requests verifies nothing else. Ties: :func:`best_of_batch`.
    """
    live = trees.parents[:, 1:] >= 0
    return best_of_batch(keys[:, 1:], live, max(max_rows - len(keys), 0))


def cut(trees: Trees, chosen: Tensor) -> Trees:
    """Cut trees to the ``chosen`` [B, N - 1] nodes after the roots, a closed set."""
    made = grow(
        trees.tokens[:, 0],
        trees.tokens[:, 1:],
        trees.parents[:, 1:] - 1,
        trees.depth[:, 1:],
        chosen,
        trees.tokens.shape[1],
    )
    # This cut numbers its candidates from the node after the root; convert them to the draft's
    # candidates. Root and padding get the root's, which is -1.
    return replace(made, source=trees.source.gather(1, made.source + 1))


def child_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return first child and next sibling of every node [B, N], ascending, -1 without one.
    ``parents [-1, 0, 0, 1]`` gives ``next_token [1, 3, -1, -1]`` and ``next_sibling [-1, 2, -1,
    -1]``. SGLang's verify kernels follow them.
    """
    num_nodes = parents.shape[1]
    node = torch.arange(num_nodes, device=parents.device)
    none = num_nodes  # larger than any node number, so that a minimum ignores it
    is_child = parents.unsqueeze(1) == node.view(1, -1, 1)  # [B, parent, child]
    first = torch.where(is_child, node, none).amin(dim=2)
    later = (node.view(1, -1) > node.view(-1, 1)) & (parents >= 0).unsqueeze(2)
    is_sibling = (parents.unsqueeze(2) == parents.unsqueeze(1)) & later
    sibling = torch.where(is_sibling, node, none).amin(dim=2)
    return first.masked_fill_(first == none, -1), sibling.masked_fill_(sibling == none, -1)


def visible_nodes(parents: Tensor, max_depth: int) -> Tensor:
    """[B, N, N] bool: row i sees itself and its ancestors, the root included. Padding sees itself
    and the root, because a softmax over nothing would be nan.
    """
    batch, num_nodes = parents.shape
    visible = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    visible[:, :, 0] = True
    above = parents
    for _ in range(max_depth):
        # The root and padding point at column 0, which is already set.
        visible.scatter_(2, above.clamp(min=0).unsqueeze(2), True)
        above = torch.where(above > 0, parents.gather(1, above.clamp(min=0)), -1)
    return visible


def visible_blocks(visible: Tensor, num_rows: Tensor) -> Tensor:
    """[sum(n_b * n_b)] bool: each request's ``visible`` [B, N, N], cut to n_b rows and columns.
    ``num_rows`` [B] holds the n_b. Reads the host to size the result.
    """
    live = torch.arange(visible.shape[1], device=visible.device) < num_rows[:, None]  # [B, N]
    return visible[live[:, :, None] & live[:, None, :]]


def ancestor_words(visible: Tensor) -> Tensor:
    """[B, N, ceil(N / 64)] int64: the rows of ``visible`` [B, N, N] as bits, lowest first. Node j
    is bit j % 64 of word j // 64; bit 63 makes a word negative.
    """
    num_nodes = visible.shape[2]
    num_words = -(-num_nodes // WORD_BITS)
    padded = torch.nn.functional.pad(visible, (0, num_words * WORD_BITS - num_nodes))
    bits = torch.ones((), dtype=torch.int64, device=visible.device) << torch.arange(
        WORD_BITS, device=visible.device
    )
    # Distinct powers of two: their sum is their union, even if bit 63 wraps around.
    return (padded.unflatten(2, (num_words, WORD_BITS)) * bits).sum(dim=3)

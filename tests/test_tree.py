"""Draft trees against one request and one node at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t import tree
from tests import oracles


@dataclass
class Candidates:
    """All proposed nodes of a batch, as lists."""

    parents: list[list[int]]
    depth: list[list[int]]
    tokens: list[list[int]]
    key: list[list[float]]
    keep: list[list[bool]]
    roots: list[int]

    def closed(self) -> torch.Tensor:
        return tree.closed_keys(
            torch.tensor(self.key), torch.tensor(self.keep), torch.tensor(self.parents), 9
        )

    def grown(self, max_drafts: int) -> tree.Trees:
        """The trees of the best candidates (``draft/test_growth`` says which these are)."""
        return tree.grow(
            torch.tensor(self.roots), torch.tensor(self.tokens), torch.tensor(self.parents),
            torch.tensor(self.depth), tree.best_per_request(self.closed(), max_drafts),
            max_drafts + 1,
        )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> Candidates:
    """1 to 4 requests of 1 to 9 candidates: chains, bushes, anything; keys with many ties."""
    size = draw(st.integers(1, 9))
    rng = random.Random(draw(st.integers(0, 2**20)))
    batch = Candidates([], [], [], [], [], [])
    for _ in range(draw(st.integers(1, 4))):
        parents = [rng.randint(-1, i - 1) for i in range(size)]
        depth: list[int] = []
        for parent in parents:
            depth.append(1 if parent < 0 else depth[parent] + 1)
        batch.parents.append(parents)
        batch.depth.append(depth)
        batch.tokens.append([rng.randrange(5) for _ in parents])  # siblings may be equal
        batch.key.append([rng.choice([0.1, 0.5, 0.5, 0.9]) for _ in parents])
        batch.keep.append([rng.random() < 0.8 for _ in parents])
        batch.roots.append(rng.randrange(5))
    return batch


def path(parents: list[int], i: int) -> list[int]:
    """The candidate and all its ancestors."""
    return [i] if parents[i] < 0 else [i, *path(parents, parents[i])]


def ranked(batch: Candidates, b: int) -> list[tuple[float, int]]:
    """(least key on the path, candidate) of all that survive the policy, best first."""
    alive = [
        (min(batch.key[b][j] for j in path(batch.parents[b], i)), i)
        for i in range(len(batch.parents[b]))
        if all(batch.keep[b][j] for j in path(batch.parents[b], i))
    ]
    return sorted(alive, key=lambda item: (-item[0], item[1]))


@given(batches(), st.integers(0, 9))
def test_links_masks_and_rows_describe_the_same_tree(batch: Candidates, max_drafts: int) -> None:
    trees = batch.grown(max_drafts)
    next_token, next_sibling = tree.child_links(trees.parents)
    visible = tree.visible_nodes(trees.parents, 9)
    rows = trees.retrieve_index()
    first_row = 0
    for b, size in enumerate(trees.num_nodes.tolist()):
        parents = trees.parents[b].tolist()
        for node in range(size):
            children = [i for i in range(size) if parents[i] == node]
            siblings = [i for i in range(size) if parents[i] == parents[node] and i > node > 0]
            assert next_token[b, node] == (children[0] if children else -1)
            assert next_sibling[b, node] == (siblings[0] if siblings else -1)
            assert visible[b, node].nonzero().flatten().tolist() == sorted(
                oracles.ancestors(parents, node)
            )
            assert rows[b, node] == first_row + node
        assert (next_token[b, size:] == -1).all()
        assert (next_sibling[b, size:] == -1).all()
        first_row += size
    lengths = torch.arange(len(rows))
    assert torch.equal(trees.positions(lengths), lengths[:, None] + trees.depth)


@given(batches(), st.integers(0, 9), st.integers(0, 2**16))
def test_masks_are_cut_to_the_rows_that_are_forwarded(
    batch: Candidates, max_drafts: int, seed: int
) -> None:
    """Live nodes only or some padding as well; down to a root alone."""
    rng = random.Random(seed)
    trees = batch.grown(max_drafts)
    visible = tree.visible_nodes(trees.parents, 9)
    rows = [rng.randint(1, max_drafts + 1) for _ in range(len(batch.roots))]
    blocks = [
        bool(visible[b, i, j])
        for b, count in enumerate(rows)
        for i in range(count)
        for j in range(count)
    ]
    assert tree.visible_blocks(visible, torch.tensor(rows)).tolist() == blocks


def keys_of(batch: Candidates, trees: tree.Trees) -> torch.Tensor:
    """[B, N]: closed keys of the trees' nodes, the root first."""
    keys = batch.closed().gather(1, trees.source.clamp(min=0))
    keys = keys.masked_fill(trees.source < 0, -torch.inf)
    keys[:, 0] = torch.inf
    return keys


@given(batches(), st.integers(0, 9), st.integers(1, 40))
def test_a_budget_cuts_the_trees_of_a_batch_to_its_best_nodes(
    batch: Candidates, max_drafts: int, max_rows: int
) -> None:
    """Roots count and stay; ties go by node number, then by request; N = 1 is a tree, too."""
    trees = batch.grown(max_drafts)
    size = len(batch.roots)
    cut = tree.cut(trees, tree.within_budget(trees, keys_of(batch, trees), max_rows))
    ranks = [
        (-key, node, b)
        for b in range(size)
        for node, candidate in enumerate(trees.source[b].tolist())
        if node > 0 and candidate >= 0
        for key, same in ranked(batch, b)
        if same == candidate
    ]
    kept = {(b, node) for _, node, b in sorted(ranks)[: max(max_rows - size, 0)]}
    for b in range(size):
        nodes = [0, *(node for node in range(1, max_drafts + 1) if (b, node) in kept)]
        pad = [0] * (max_drafts + 1 - len(nodes))
        parents = [int(trees.parents[b, node]) for node in nodes]
        assert cut.num_nodes[b] == len(nodes)
        assert cut.tokens[b].tolist() == [int(trees.tokens[b, n]) for n in nodes] + pad
        assert cut.depth[b].tolist() == [int(trees.depth[b, n]) for n in nodes] + pad
        assert cut.source[b].tolist() == [int(trees.source[b, n]) for n in nodes] + [
            -1 for _ in pad
        ]
        assert cut.parents[b].tolist() == [
            -1, *(nodes.index(parent) for parent in parents[1:]), *(-1 for _ in pad)
        ]  # fmt: skip
    assert int(cut.num_nodes.sum()) <= max(max_rows, size)

"""Our trees beside SGLang's own Triton code. Runs without a GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t import tree
from sglang_c2t.cpu.tree_verify import verify_tree
from tests.kernels.processes import run_worker

try:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton
except ImportError:  # where SGLang 0.5.17 has it
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_triton


VOCABULARY = 3  # small: siblings often carry the same token
UNTOUCHED = -7


def random_trees(rng: random.Random, batch: int, max_nodes: int) -> tree.Trees:
    """The first tree is a bare root, the second has all N nodes, the others any number."""
    size = max_nodes - 1
    # A parent is at most four nodes back, so that large trees are deep as well.
    parents = [[rng.randint(max(-1, i - 4), i - 1) for i in range(size)] for _ in range(batch)]
    depth = [[0] * size for _ in range(batch)]
    for b, i in itertools.product(range(batch), range(size)):
        above = parents[b][i]
        depth[b][i] = 1 if above < 0 else depth[b][above] + 1
    keep = torch.tensor(
        [[b != 0 and (b == 1 or rng.random() < 0.8) for _ in row] for b, row in enumerate(parents)],
        dtype=torch.bool,
    )
    links = torch.tensor(parents, dtype=torch.long)
    closed = tree.closed_keys(torch.zeros(batch, size), keep, links, max_nodes)
    return tree.grow(
        torch.tensor([rng.randrange(VOCABULARY) for _ in range(batch)]),
        torch.tensor([[rng.randrange(VOCABULARY) for _ in row] for row in parents]).long(),
        links,
        torch.tensor(depth, dtype=torch.long),
        tree.best_per_request(closed, size),
        max_nodes,
    )


def greedy_acceptance(rng: random.Random, batch: int, max_nodes: int, width: int) -> None:
    """SGLang's kernel and ours, which ``cpu/test_tree_ops`` holds against loops, write the same.

    ``width`` is that of ``accept_index``: at most ``width`` - 1 drafts are accepted.
    """
    trees = random_trees(rng, batch, max_nodes)
    sizes = trees.num_nodes.tolist()
    target = torch.full((batch * max_nodes,), UNTOUCHED)  # behind the live rows: no token at all
    target[: sum(sizes)] = torch.tensor([rng.randrange(VOCABULARY) for _ in range(sum(sizes))])
    tables = [
        table.contiguous()  # SGLang's kernels ignore strides
        for table in (trees.tokens, trees.retrieve_index(), *tree.child_links(trees.parents))
    ]

    results = []
    for verify in (verify_tree_greedy_triton, verify_tree):
        predicts = torch.full((batch * max_nodes,), UNTOUCHED, dtype=torch.int32)
        accept_index = torch.full((batch, width), -1, dtype=torch.int32)
        accept_token_num = torch.full((batch,), UNTOUCHED, dtype=torch.int32)
        verify(predicts, accept_index, accept_token_num, *tables, target.view(batch, max_nodes))
        results.append((predicts.tolist(), accept_index.tolist(), accept_token_num.tolist()))
    assert results[0] == results[1]


def verify_trees() -> None:
    """Batches of 1 to 6 trees of up to 12 nodes, among them trees that are all root."""
    rng = random.Random(0)
    for _ in range(150):
        max_nodes = rng.choice([1, 2, 5, 8, 12])
        greedy_acceptance(rng, rng.randint(1, 6), max_nodes, width=rng.randint(1, max_nodes + 1))


def test_greedy_verify_kernel_of_sglang_accepts_our_paths() -> None:
    run_worker("test_sglang", "verify_trees")

"""SGLang's Triton kernels on packed trees, in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import itertools
import random

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from torch import Tensor

from sglang_c2t import tree
from sglang_c2t.cpu.tree_verify import verify_tree
from tests import oracles

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


# -- acceptance ---------------------------------------------------------------------------


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


def verify() -> None:
    """Batches of 1 to 6 trees of up to 12 nodes, among them trees that are all root."""
    rng = random.Random(0)
    for _ in range(150):
        max_nodes = rng.choice([1, 2, 5, 8, 12])
        greedy_acceptance(rng, rng.randint(1, 6), max_nodes, width=rng.randint(1, max_nodes + 1))


# -- attention ----------------------------------------------------------------------------


def tree_attention(
    rng: random.Random,
    *,
    batch: int,
    max_nodes: int,
    max_prefix: int,
    mask_dtype: torch.dtype = torch.bool,
    is_causal: bool = True,
    skip_prefix_mask: bool = True,
    logit_cap: float = 0.0,
) -> None:
    """Ragged trees behind ragged prefixes equal dense attention.

    Whatever must not be read is nan: free slots of the pool, and the rows and the requests with
    which a CUDA graph is padded. Nor may the output of those rows be written.
    """
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    heads, kv_heads, dim, pad_rows, pad_requests = 4, 2, 16, 3, 2
    trees = random_trees(rng, batch, max_nodes)
    sizes = trees.num_nodes.tolist()
    rows = sum(sizes)
    prefixes = [rng.randint(1, max_prefix) for _ in range(batch)]

    # The committed slots of the requests, scattered over a pool with free slots between.
    pool = 2 * sum(prefixes)
    free = rng.sample(range(pool), pool)
    slots = [[free.pop() for _ in range(length)] for length in prefixes]
    q, k, v = (
        torch.randn(rows, count, dim, generator=generator) for count in (heads, kv_heads, kv_heads)
    )
    k_pool, v_pool = torch.randn(2, pool, kv_heads, dim, generator=generator).unbind()
    k_pool[free], v_pool[free] = torch.nan, torch.nan

    # One block per request, [n, prefix + n]: what a row sees of the prefix, then of the tree.
    visible = tree.visible_nodes(trees.parents, max_nodes)
    blocks, sees = [], []
    for b, (size, length) in enumerate(zip(sizes, prefixes, strict=True)):
        of_prefix = torch.rand(size, length, generator=generator) < 0.5
        block = torch.cat([of_prefix, visible[b, :size, :size]], dim=1)
        blocks.append(block)
        # A kernel that skips the mask's prefix sees all of it, whatever is written there.
        seen = torch.cat([of_prefix | skip_prefix_mask, block[:, length:]], dim=1)
        sees.append(seen.tolist())

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_full((pad_rows, *values.shape[1:]), torch.nan)])

    def offsets(lengths: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor([0, *lengths, *[0] * pad_requests]).cumsum(0).to(dtype)

    out = torch.full((rows + pad_rows, heads, dim), float(UNTOUCHED))
    extend_attention_fwd(
        padded(q),
        padded(k),
        padded(v),
        out,
        k_pool,
        v_pool,
        qo_indptr=offsets(sizes, torch.int32),
        kv_indptr=offsets(prefixes, torch.int32),
        kv_indices=torch.tensor(list(itertools.chain(*slots))),
        custom_mask=torch.cat([block.flatten() for block in blocks]).to(mask_dtype),
        is_causal=is_causal,
        mask_indptr=offsets([block.numel() for block in blocks], torch.int64),
        max_len_extend=max_nodes,
        k_scale=1.0,
        v_scale=1.0,
        sm_scale=0.3,
        logit_cap=logit_cap,
        skip_prefix_custom_mask=skip_prefix_mask,
    )
    own = torch.arange(pool, pool + rows).split(sizes)
    expected = oracles.attention(
        q,
        torch.cat([k_pool, k]),
        torch.cat([v_pool, v]),
        [[*before, *here.tolist()] for before, here in zip(slots, own, strict=True)],
        sizes,
        sees,
        0.3,
        logit_cap,
    )
    torch.testing.assert_close(out[:rows].double(), expected, rtol=1e-5, atol=1e-5)
    assert (out[rows:] == UNTOUCHED).all()


def attention() -> None:
    """Trees within one tile of the kernel, in all its modes; then trees and prefixes of two."""
    rng = random.Random(1)
    modes = itertools.product([torch.bool, torch.uint8], [True, False], [True, False], [0.0, 5.0])
    for mask_dtype, is_causal, skip_prefix_mask, logit_cap in modes:
        tree_attention(
            rng,
            batch=rng.randint(2, 4),
            max_nodes=rng.randint(2, 12),
            max_prefix=20,
            mask_dtype=mask_dtype,
            is_causal=is_causal,
            skip_prefix_mask=skip_prefix_mask,
            logit_cap=logit_cap,
        )
    tree_attention(rng, batch=3, max_nodes=1, max_prefix=5)  # roots alone: plain decoding
    tree_attention(rng, batch=4, max_nodes=80, max_prefix=90)


def main() -> None:
    """Check both kernels in one process."""
    verify()
    attention()

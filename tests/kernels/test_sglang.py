"""Our packed rows, masks and trees beside SGLang's own Triton code. Runs without a GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import triton

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import (
    compact_row_index,
    scatter_compact_to_strided,
)
from sglang.srt.speculative.ragged_verify import (
    RaggedVerifyLayout,
    build_ragged_target_verify_geometry,
)

from sglang_c2t import tree
from sglang_c2t.cpu.tree_verify import verify_tree
from sglang_c2t.kernels import layout, masks, rows
from tests.kernels.processes import run_worker
from tests.kernels.test_masks import Forest, random_forest
from tests.kernels.test_rows import Batch, random_batch

try:
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
except ImportError:  # 0.5.17
    from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton

try:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton
except ImportError:  # where SGLang 0.5.17 has it
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_triton


def ragged_rows(batch: Batch) -> None:
    """DSPARK's packing: which rows, the way back, indptr, the KV slots of rows and of keys."""
    lens = batch.ints(batch.lens, torch.int32)
    prefixes = batch.ints(batch.prefixes)
    pool, slots = batch.pool()
    request, within, valid = compact_row_index(
        verify_lens=lens, padded_total=batch.num_tokens, device="cpu"
    )
    draft = batch.table(batch.num_rows, dtype=torch.int64)
    packed = layout.lay_out(
        lens, draft, draft, pool, slots, prefixes,
        tokens=batch.num_tokens, slots=batch.slots, places=batch.width,
    )  # fmt: skip
    assert torch.equal(packed.request[valid], request[valid].long())
    assert torch.equal(packed.rows[valid], (request * batch.width + within)[valid].long())
    assert torch.equal(packed.rows == batch.num_rows, ~valid)

    theirs = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=lens, graph_num_tokens=batch.num_tokens
    )
    in_slots = theirs.padded_to_bucket(padded_bs=batch.slots)
    of_padding = torch.ones(batch.slots - batch.size, dtype=torch.int64)
    attention = build_ragged_target_verify_geometry(
        seq_lens=torch.cat((prefixes, of_padding)), layout=in_slots
    )
    assert torch.equal(packed.slot_rows, in_slots.verify_lens)
    assert torch.equal(packed.row_starts, attention.cu_seqlens_q)
    assert torch.equal(packed.slot_keys, attention.cache_seqlens_int32)
    assert torch.equal(packed.key_starts, attention.cu_seqlens_k)
    logits = batch.table(batch.num_tokens, 7)
    assert torch.equal(
        rows.scatter_rows(logits, lens, batch.width),
        scatter_compact_to_strided(
            compact=logits, layout=theirs, fill_value=0.0, verify_num_draft_tokens=batch.width
        ),
    )
    assert torch.equal(rows.indptr(lens, batch.size), theirs.qo_indptr_device)

    locs = torch.zeros(batch.num_tokens, dtype=torch.int64)
    assign_extend_cache_locs[(batch.size,)](
        slots, pool, prefixes, prefixes + lens, locs, pool.shape[1],
        triton.next_power_of_2(batch.size),
    )  # fmt: skip
    assert torch.equal(packed.out_cache_loc, locs)

    kv_indptr = rows.indptr(lens, batch.size, prefix_lens=prefixes)
    expected = torch.zeros(int(kv_indptr[-1]), dtype=torch.int32)
    create_flashinfer_kv_indices_triton[(batch.size,)](
        pool, slots, prefixes + lens, kv_indptr, None, expected, pool.shape[1]
    )
    found = torch.zeros_like(expected)
    rows.ragged_kv_indices(pool, slots, prefixes, lens, kv_indptr, found)
    assert torch.equal(found, expected)


def uniform_masks(forest: Forest) -> None:
    """N rows for every tree: SGLang's packing of its own bool mask gives the same bytes."""
    try:
        from sglang.kernels.ops.speculative.pack_verify_mask import pack_verify_mask_into
    except ImportError:  # 0.5.17
        return
    width = len(forest.parents[0])
    forest.num_rows = [width] * len(forest.parents)
    dense = [forest.bits(b) for b in range(len(forest.parents))]
    num_rows, prefixes = forest.ints(forest.num_rows), forest.ints(forest.prefixes)
    indptr = masks.mask_indptr(prefixes, num_rows, len(dense))
    found, expected = torch.zeros(2, int(indptr[-1]), dtype=torch.uint8).unbind()
    words = masks.ancestor_words_from_parents(forest.links(), forest.max_depth)
    masks.pack_tree_mask(words, prefixes, num_rows, indptr, found)
    pack_verify_mask_into(
        torch.tensor([bit for bits in dense for bit in bits], dtype=torch.bool),
        rows.indptr(num_rows, len(dense), prefix_lens=prefixes),
        indptr,
        expected,
        batch_size=len(dense),
        query_width=width,
        max_kv_len=max(forest.prefixes) + width,
    )
    assert torch.equal(found, expected)


def main() -> None:
    """Random batches; at least one request and one row of each, as SGLang asks."""
    rng = random.Random(0)
    rows.FULL_GRID = 8
    for width in (1, 2, 16, 65):
        for _ in range(3):
            batch = random_batch(rng, width, size=rng.randint(1, 6))
            batch.lens = [max(length, 1) for length in batch.lens]
            batch.num_tokens = max(batch.num_tokens, sum(batch.lens))
            ragged_rows(batch)
            uniform_masks(random_forest(rng, width))


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


def test_rows_and_masks_are_those_of_sglang_and_flashinfer() -> None:
    run_worker("test_sglang")


def test_greedy_verify_kernel_of_sglang_accepts_our_paths() -> None:
    run_worker("test_sglang", "verify_trees")

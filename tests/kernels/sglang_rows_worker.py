"""Our packed rows, index arrays and masks against SGLang's and FlashInfer's own code."""

from __future__ import annotations

import random

import torch
import triton
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import (
    compact_row_index,
    scatter_compact_to_strided,
)
from sglang.srt.speculative.ragged_verify import (
    RaggedVerifyLayout,
    build_ragged_target_verify_geometry,
)

from sglang_c2t.kernels import layout, masks, rows
from tests.kernels.masks_worker import Forest, random_forest
from tests.kernels.rows_worker import Batch, random_batch

try:
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
except ImportError:  # 0.5.17
    from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton


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

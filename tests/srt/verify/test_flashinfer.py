"""Arguments of FlashInfer for packed rows, without FlashInfer: plans, key indices, masks."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_c2t.srt.verify import flashinfer as flashinfer_verify
from tests.doubles import double
from tests.srt.verify.test_tree import Case, cases

fast = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bit(mask: list[int], start: int, offset: int) -> bool:
    """As FlashInfer's kernel reads it (``variants.cuh``)."""
    return bool(mask[start + offset // 8] >> (offset % 8) & 1)


@fast
@given(case=cases(), ghosts=st.integers(0, 3), chains=st.booleans())
def test_flashinfer_rows_find_their_keys_and_masks(case: Case, ghosts: int, chains: bool) -> None:
    """In slots of their own for every request; those without one have no rows and one key."""
    packing = case.verify_input().packing
    if chains:
        packing.parents = None
    batch = len(case.parents)
    slots = batch + ghosts
    forward_batch = double(
        "ForwardBatch",
        batch_size=slots,
        seq_lens=torch.tensor(case.seq_lens + [1] * ghosts),
        seq_lens_cpu=torch.tensor(case.seq_lens + [1] * ghosts),
        req_pool_indices=torch.tensor(case.slots + [0] * ghosts),
    )
    pool = double("ReqToTokenPool", req_to_token=case.table)
    backend = double(flashinfer_verify.RaggedFlashInferBackend, req_to_token_pool=pool)
    room = 1000
    buffers = flashinfer_verify._GraphBuffers(
        *(torch.full((room,), -1, dtype=torch.int32) for _ in range(5)),
        mask=torch.zeros(room, dtype=torch.uint8),
    )
    backend._fill(forward_batch, packing, buffers)
    host = flashinfer_verify._host_plan(forward_batch, packing)

    keys, key, row = buffers.kv_indices.tolist(), 0, 0
    mask_bytes = 0
    for b, length in enumerate(case.seq_lens):
        rows = [node for owner, node in case.forwarded if owner == b]
        size = length + len(rows)
        assert (buffers.qo_indptr[b], buffers.kv_indptr[b]) == (row, key)
        assert keys[key : key + size] == case.table[case.slots[b], :size].tolist()
        for q, node in enumerate(rows if not chains else []):
            seen = [bit(buffers.mask.tolist(), mask_bytes, q * size + k) for k in range(size)]
            assert seen == [True] * length + [case.sees(b, node, column) for column in rows]
        row, key = row + len(rows), key + size
        mask_bytes += -(-len(rows) * size // 8)
    assert host.mask_bytes == mask_bytes
    assert buffers.qo_indptr[batch : slots + 1].tolist() == [row] * (ghosts + 1)
    assert buffers.kv_indptr[batch : slots + 1].tolist() == [key + g for g in range(ghosts + 1)]
    # The planner on the host gets the same.
    assert host.qo_indptr.tolist() == buffers.qo_indptr[: slots + 1].tolist()
    assert host.kv_indptr.tolist() == buffers.kv_indptr[: slots + 1].tolist()
    assert host.kv_lens.tolist() == host.kv_indptr.diff().tolist()

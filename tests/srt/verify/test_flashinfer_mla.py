"""Arguments of FlashInfer's MLA for packed rows, without FlashInfer: plans and slots of keys."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.verify import flashinfer_mla
from sglang_c2t.srt.verify.flashinfer_mla import RaggedFlashInferMLABackend
from sglang_c2t.srt.verify.packing import HostSizes, Packing
from tests.doubles import double

WIDTH, MOST, CONTEXT = 4, 6, 40
TIERS = Tiers(MOST, WIDTH)


@given(
    rows=st.lists(st.integers(1, WIDTH), min_size=1, max_size=MOST - 1),
    prefix=st.lists(st.integers(1, CONTEXT - WIDTH), min_size=MOST, max_size=MOST),
    seed=st.integers(0, 100),
)
def test_flashinfer_mla_replay_plans_the_captured_rows_and_keys(
    rows: list[int], prefix: list[int], seed: int
) -> None:
    """FlashInfer launches by the rows of a slot on average, which a graph keeps."""
    batch, prefix = len(rows), prefix[: len(rows)]
    tokens = TIERS.pick(sum(rows), batch)
    assert tokens is not None
    slots = TIERS.slots(tokens)
    table = torch.randperm(MOST * CONTEXT, generator=torch.Generator().manual_seed(seed)).int()
    table = table.view(MOST, CONTEXT)
    num_rows = torch.tensor(rows, dtype=torch.int32)
    packing = Packing(num_rows, WIDTH, sizes=HostSizes(num_rows))
    lens = torch.tensor(prefix + [1] * (slots - batch))
    forward_batch = double(
        "ForwardBatch", batch_size=slots, seq_lens=lens, seq_lens_cpu=lens,
        req_pool_indices=torch.arange(slots),
    )  # fmt: skip
    host = flashinfer_mla._host_plan(forward_batch, packing, tokens)
    assert len(host.kv_lens) == slots
    assert int(host.qo_indptr[-1]) == tokens
    assert host.qo_indptr.diff()[:batch].tolist() == rows
    assert host.kv_indptr.diff().tolist() == host.kv_lens.tolist()
    # No row of padding is without a key, whatever it reads.
    assert bool((host.kv_lens > host.qo_indptr.diff()).all())

    pool = double("ReqToTokenPool", req_to_token=table)
    backend = double(RaggedFlashInferMLABackend, req_to_token_pool=pool)
    keys = torch.full((MOST * CONTEXT,), -1, dtype=torch.int32)
    starts = torch.empty(slots + 1, dtype=torch.int32)
    backend._fill(forward_batch, packing, starts, keys)
    for b, size in enumerate(host.kv_lens.tolist()[:batch]):
        assert size == prefix[b] + rows[b]
        start = int(host.kv_indptr[b])
        assert keys[start : start + size].tolist() == table[b, :size].tolist()

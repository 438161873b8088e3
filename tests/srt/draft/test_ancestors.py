"""Which draft backends get the slots of their rows' ancestors, and how."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_c2t.srt.draft import ancestors
from tests.doubles import double


def flashinfer(indices: list[int], num_wrappers: int = 1) -> Any:
    """SGLang's backend of two draft steps over these KV slots, as each step's plan left it."""
    wrapper = double(
        "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper",
        _paged_kv_indptr_buf=torch.tensor([0, 3, 6], dtype=torch.int32),
        _paged_kv_indices_buf=torch.tensor(indices, dtype=torch.int32),
    )
    metadata = double("DecodeMetadata", decode_wrappers=[wrapper])
    step = double("FlashInferAttnBackend", num_wrappers=num_wrappers, forward_metadata=metadata)
    return double("FlashInferMultiStepDraftBackend", attn_backends=[step, step])


def test_ancestors_rewrite_flashinfers_index_buffer() -> None:
    """Two beams behind a prefix of one slot; the first descends from the second's first node."""
    backend = flashinfer([9, 10, 11, 9, 20, 21])
    assert ancestors.followed_by(backend) == "exact"
    ancestors.follow(backend, 1, torch.tensor([[[1, 0], [0, 1]]]))
    (wrapper,) = backend.attn_backends[1].forward_metadata.decode_wrappers
    assert wrapper._paged_kv_indices_buf.tolist() == [9, 20, 11, 9, 10, 21]


def test_ancestors_leave_other_backends_alone() -> None:
    patched = SimpleNamespace(set_draft_ancestors=lambda step, rows: None)
    others = [(flashinfer([9], num_wrappers=2), "stock"), (SimpleNamespace(), "stock")]
    for backend, whose in [*others, (patched, "SGLang's exact")]:
        assert ancestors.followed_by(backend) == whose
        ancestors.follow(backend, 1, torch.tensor([[[1, 0], [0, 1]]]))  # touches nothing of it
    assert ancestors.followed_by(None) == "exact"  # one layer needs none

"""Exact ancestors: which KV slots a draft step's beam rows attend to, per attention backend.

Stock SGLang gives row t of step i the slots that row t wrote in steps 0..i. The beams are re-sorted
between steps, so these are not the row's ancestors (sgl-project/sglang#8409, closed). Lengths are
right, so plans stay valid, and the last i + 1 index entries of each row are rewritten in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_c2t.kernels.rows import follow_ancestors
from sglang_c2t.srt.cpu.attention import TorchCpuMultiStepDraftBackend


def followed_by(draft_backend: Any) -> str:
    """Which ancestors rows attend to in a multi-step draft backend: exact ones, or stock."""
    if hasattr(draft_backend, "set_draft_ancestors"):  # patches/, or a fix to come
        return "SGLang's exact"
    if draft_backend is None or isinstance(draft_backend, TorchCpuMultiStepDraftBackend):
        return "exact"
    # Two wrappers (sliding window, cross attention) would share one index buffer.
    known = type(draft_backend).__name__ == "FlashInferMultiStepDraftBackend" and all(
        step.num_wrappers == 1 for step in draft_backend.attn_backends
    )
    return "exact" if known else "stock"


def follow(draft_backend: Any, step: int, rows: Tensor) -> None:
    """Before draft forward ``step``, point each of its rows to its ancestors, where that is for us:
    they were forwarded in ``rows`` [B, K, step + 1], see :attr:`TreeGrowth.ancestor_rows`.
    """
    if followed_by(draft_backend) != "exact":
        return
    backend = draft_backend.attn_backends[step]
    if isinstance(draft_backend, TorchCpuMultiStepDraftBackend):
        backend.use_ancestors(rows)
        return
    (wrapper,) = backend.forward_metadata.decode_wrappers
    follow_ancestors(wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, rows)

"""Exact ancestors: which KV slots a draft step's beam rows attend to, per attention backend.

Stock SGLang gives row t of step i the slots that row t wrote in steps 0..i. The beams are
re-sorted between steps, so these are not the row's ancestors (sgl-project/sglang#8409,
closed). The lengths are right and only the slots are wrong, so plans stay valid and the
last i + 1 index entries of each row are rewritten in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_c2t.kernels.rows import follow_ancestors
from sglang_c2t.srt.cpu.attention import TorchCpuMultiStepDraftBackend


def sglang_follows(draft_backend: Any) -> bool:
    """Whether SGLang tells this backend the ancestors by itself (patches/, or a fix to come)."""
    return hasattr(draft_backend, "set_draft_ancestors")


def can_follow(draft_backend: Any) -> bool:
    """Whether :func:`follow` knows this multi-step draft backend."""
    if isinstance(draft_backend, TorchCpuMultiStepDraftBackend):
        return True
    # Two wrappers (sliding window, cross attention) would share one index buffer.
    return type(draft_backend).__name__ == "FlashInferMultiStepDraftBackend" and all(
        step.num_wrappers == 1 for step in draft_backend.attn_backends
    )


def follow(draft_backend: Any, step: int, rows: Tensor) -> None:
    """Before draft forward ``step``, point each of its rows to its ancestors, which were forwarded
    in ``rows`` [B, K, step + 1], see :attr:`TreeGrowth.ancestor_rows`.
    """
    backend = draft_backend.attn_backends[step]
    if isinstance(draft_backend, TorchCpuMultiStepDraftBackend):
        backend.use_ancestors(rows)
        return
    (wrapper,) = backend.forward_metadata.decode_wrappers
    follow_ancestors(wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, rows)

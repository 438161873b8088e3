"""Exact ancestors: which KV slots a draft step's beam rows attend to, per attention backend.

SGLang gives row t of step i the slots that row t wrote in steps 0..i. It re-sorts the beams between
steps, so these are not the row's ancestors (sgl-project/sglang#8409, closed). Lengths and plans are
right, so this module rewrites the last i + 1 index entries of each row in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_c2t.kernels.rows import follow_ancestors
from sglang_c2t.srt.cpu.attention import TorchCpuMultiStepDraftBackend


def followed_by(draft_backend: Any) -> str:
    """Return whether a multi-step draft backend attends to exact ancestors or SGLang's."""
    if hasattr(draft_backend, "set_draft_ancestors"):  # patches/, or a future fix
        return "SGLang's exact"
    if draft_backend is None or isinstance(draft_backend, TorchCpuMultiStepDraftBackend):
        return "exact"
    # Two wrappers (sliding window, cross attention) would share one index buffer.
    known = type(draft_backend).__name__ == "FlashInferMultiStepDraftBackend" and all(
        step.num_wrappers == 1 for step in draft_backend.attn_backends
    )
    return "exact" if known else "stock"


def follow(draft_backend: Any, step: int, rows: Tensor) -> None:
    """Before draft forward ``step``, point its rows to their ancestors unless SGLang does. The
    ancestors were forwarded in ``rows`` [B, K, step + 1], see :attr:`Beams.ancestor_rows`.
    """
    if followed_by(draft_backend) != "exact":
        return
    backend = draft_backend.attn_backends[step]
    if isinstance(draft_backend, TorchCpuMultiStepDraftBackend):
        backend.use_ancestors(rows)
        return
    (wrapper,) = backend.forward_metadata.decode_wrappers
    follow_ancestors(wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, rows)

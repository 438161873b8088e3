"""SGLang's layout of a packed forward, already computed for its attention. SGLang's
``RaggedVerifyLayout`` has the rows of each request. Its graph runner and attention then pad, sum
and add the keys in a dozen launches per step. :func:`~sglang_c2t.kernels.layout.lay_out` has done
all that in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from sglang.srt.speculative.ragged_verify import RaggedTargetVerifyGeometry, RaggedVerifyLayout
from torch import Tensor

from sglang_c2t.kernels.layout import Layout
from sglang_c2t.srt import attach

# B requests, S >= B slots of the forward, T rows of it


class PackedLayout(RaggedVerifyLayout, frozen=True, kw_only=True):
    """SGLang's layout of T rows over all S slots, with the keys of each slot."""

    slot_keys: Tensor
    """[S] int32."""

    key_starts: Tensor
    """[S + 1] int32."""

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Build SGLang's layout from ours."""
        return cls(
            verify_lens=layout.slot_rows,
            graph_num_tokens=len(layout.input_ids),
            extend_start_loc=layout.row_starts[:-1],
            qo_indptr_device=layout.row_starts,
            slot_keys=layout.slot_keys,
            key_starts=layout.key_starts,
        )

    def padded_to_bucket(self, *, padded_bs: int, cap: int | None = None) -> Self:
        """Return itself: it already has the slots of the graph."""
        assert (padded_bs, cap) == (self.bs, None), (padded_bs, cap, self.bs)
        return self


def patch_backend_for_ragged_layout(backend: Any) -> None:
    """Make the FlashAttention backend read our layouts' tables instead of computing them."""
    if type(backend).__module__ == "sglang.srt.layers.attention.flashattention_backend":
        attach.wrap_global(
            "sglang.srt.layers.attention.flashattention_backend",
            "build_ragged_target_verify_geometry",
            _geometry,
        )


def _geometry(
    stock: Callable[..., RaggedTargetVerifyGeometry], *, seq_lens: Tensor, layout: Any
) -> RaggedTargetVerifyGeometry:
    if not isinstance(layout, PackedLayout):  # as at capture
        return stock(seq_lens=seq_lens, layout=layout)
    return RaggedTargetVerifyGeometry(
        cache_seqlens_int32=layout.slot_keys,
        cu_seqlens_q=layout.qo_indptr_device,
        cu_seqlens_k=layout.key_starts,
        max_seq_len_q=None,  # N
    )

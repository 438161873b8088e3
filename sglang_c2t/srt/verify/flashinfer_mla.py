"""FlashInfer's MLA attention for verification of packed rows: chains, eager and in graphs.

SGLang's backend plans one width for all requests. Here, as in ``flashinfer.py``, each graph of
(S, T) is planned from the rows of each request. The kernel reads only the plan and the key slots.
Its launch stays as captured, and FlashInfer chose it by the mean rows per slot (``MLAPlan`` in its
``scheduler.cuh``). So a replay must plan as many rows as its capture: padding rows go to the slots
after the requests, as in :class:`~sglang_c2t.kernels.layout.Layout`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_mla_backend import (
    FlashInferMLAAttnBackend,
    PrefillMetadata,
    fast_mla_decode_plan,
)
from torch import Tensor

from sglang_c2t.kernels.rows import indptr, ragged_kv_indices
from sglang_c2t.srt import compat
from sglang_c2t.srt.verify.flashinfer import HostPlan
from sglang_c2t.srt.verify.packed import packing_of
from sglang_c2t.srt.verify.packing import Packing

# B requests, S >= B slots, T rows of a graph


class RaggedFlashInferMLABackend(FlashInferMLAAttnBackend):
    """SGLang's backend, with plans for verify inputs that have a packing."""

    supports_ragged_verify_graph = True
    supports_ragged_verify_eager = True

    _c2t_kv_indices: Tensor
    """[slots * context + rows] int32: read by captured kernels, shared by all tiers."""

    _c2t_starts: Tensor
    """[slots + 1] int32: first key of each slot."""

    _c2t_wrappers: dict[tuple[int, int], Any]
    """FlashInfer's wrapper for each (S, T)."""

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: Tensor | None = None
    ) -> None:
        """Allocate the graphs' buffers."""
        new = self.workspace_buffer.new_zeros
        if kv_indices_buf is None:
            capacity = max_bs * self.max_context_len + max_num_tokens
            kv_indices_buf = new(capacity, dtype=torch.int32)
        super().init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf)
        self._c2t_kv_indices = kv_indices_buf
        self._c2t_starts = new(max_bs + 1, dtype=torch.int32)
        self._c2t_wrappers = {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan the attention of one replay, or of a capture."""
        packing = packing_of(forward_batch)
        if packing is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        tokens = forward_batch.spec_info.ragged_verify_layout.graph_num_tokens
        key, host = (forward_batch.batch_size, tokens), _host_plan(forward_batch, packing, tokens)
        if in_capture:
            self._c2t_wrappers[key] = self._graph_wrapper(forward_batch.batch_size)
            # This chooses FlashInfer's module, which fixes the kernel's launch.
            self._plan(self._c2t_wrappers[key], host, self._c2t_kv_indices)
        else:
            self._fill(forward_batch, packing, self._c2t_starts, self._c2t_kv_indices)
            fast_mla_decode_plan(
                self._c2t_wrappers[key], host.qo_indptr, host.kv_indptr, self._c2t_kv_indices,
                host.kv_lens, *self._shape(),
            )  # fmt: skip
        self.forward_metadata = PrefillMetadata(self._c2t_wrappers[key], False)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager forward."""
        packing = packing_of(forward_batch)
        if packing is None:
            super().init_forward_metadata(forward_batch)
            return
        host, kv_indices = self.eager_plan(forward_batch, packing)
        self._plan(self.prefill_wrapper_verify, host, kv_indices)
        self.forward_metadata = PrefillMetadata(self.prefill_wrapper_verify, False)

    def eager_plan(self, forward_batch: Any, packing: Packing) -> tuple[HostPlan, Tensor]:
        """Compute the inputs of the planner and the kernel for an eager forward."""
        host = _host_plan(forward_batch, packing, packing.total)
        new = forward_batch.seq_lens.new_empty
        kv_indices = new(int(host.kv_indptr[-1]), dtype=torch.int32)
        starts = new(forward_batch.batch_size + 1, dtype=torch.int32)
        self._fill(forward_batch, packing, starts, kv_indices)
        return host, kv_indices

    def _fill(
        self, forward_batch: Any, packing: Packing, starts: Tensor, kv_indices: Tensor
    ) -> None:
        """Write the slots of the requests' keys; those of padding are arbitrary."""
        batch = len(packing.num_rows)
        pool: Any = self.req_to_token_pool
        prefix = forward_batch.seq_lens[:batch]
        indptr(packing.num_rows, batch, prefix_lens=prefix, out=starts)
        ragged_kv_indices(
            pool.req_to_token,
            forward_batch.req_pool_indices[:batch],
            prefix,
            packing.num_rows,
            starts,
            kv_indices,
        )

    def _graph_wrapper(self, slots: int) -> Any:
        from flashinfer import BatchMLAPagedAttentionWrapper

        new = self.workspace_buffer.new_empty
        return BatchMLAPagedAttentionWrapper(
            self.workspace_buffer,
            use_cuda_graph=True,
            # FlashInfer requires these three, although the kernel does not read them.
            qo_indptr=new(slots + 1, dtype=torch.int32),
            kv_indptr=new(slots + 1, dtype=torch.int32),
            kv_len_arr=new(slots, dtype=torch.int32),
            kv_indices=self._c2t_kv_indices,
            backend="auto",
        )

    def _plan(self, wrapper: Any, host: HostPlan, kv_indices: Tensor) -> None:
        """Run FlashInfer's own plan; with host tensors it copies nothing back from the device."""
        wrapper.plan(host.qo_indptr, host.kv_indptr, kv_indices, host.kv_lens, *self._shape())

    def _shape(self) -> tuple[Any, ...]:
        """Return heads, sizes of latents and of the RoPE part, page size, causal, scale, dtypes."""
        of = self.indices_updater_prefill
        sizes = of.num_local_heads, of.kv_lora_rank, of.qk_rope_head_dim
        return *sizes, 1, True, of.scaling, of.q_data_type, of.data_type


def _host_plan(forward_batch: Any, packing: Packing, tokens: int) -> HostPlan:
    """Plan T rows; padding rows share the slots after the requests, after one key."""
    rows = packing.host_rows
    left, spare = tokens - int(rows.sum()), forward_batch.batch_size - len(rows)
    assert left == 0 or spare > 0, f"{left} rows of padding, and no slot for them"
    padding = torch.arange(left, left + spare, dtype=torch.int32) // max(spare, 1)
    prefix = forward_batch.seq_lens_cpu[: len(rows)]
    keys = torch.cat((prefix.to(torch.int32) + rows, 1 + padding))
    return HostPlan.of_slots(torch.cat((rows, padding)), keys)


def adopt(backend: FlashInferMLAAttnBackend) -> None:
    """Make SGLang's backend of the target verify packed rows; see ``flashinfer.adopt``."""
    backend.__class__ = RaggedFlashInferMLABackend


def unsupported_reason(backend: Any, *, trees: bool) -> str | None:
    """Return why FlashInfer's MLA cannot verify packed rows; ``None`` if it can."""
    if trees:
        return "FlashInfer's attention over latents (MLA) reads no masks"
    if compat.translates_slots(backend):
        return "the KV pool hands out translated slots"
    return None

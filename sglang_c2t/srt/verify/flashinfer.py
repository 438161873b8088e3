"""FlashInfer attention for verification of packed rows: chains and trees, eager and in graphs.

FlashInfer's kernel takes any number of rows per request. In a CUDA graph the numbers may change at
each replay, within the captured slots S and total rows (FlashInfer's ``scheduler.cuh``,
``PrefillSplitQOKVIndptr``). SGLang's backend plans one width for all requests and keys its graphs
by batch size. Here the key is (S, T), and the plan uses the rows of each request, which
:class:`~sglang_c2t.srt.verify.packing.Packing` has on the host. This needs no further transfer, no
bool mask and no ``segment_packbits``.

Chains are causal. A tree's mask is packed directly from its nodes' ancestors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.flashinfer_backend import (
    FlashInferAttnBackend,
    PrefillMetadata,
    fast_prefill_plan,
)
from torch import Tensor

from sglang_c2t.kernels.masks import mask_indptr, pack_tree_mask
from sglang_c2t.kernels.rows import indptr, ragged_kv_indices
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.verify.packed import packing_of
from sglang_c2t.srt.verify.packing import Packing

logger = logging.getLogger(__name__)

#: Most bytes of a workspace that the user did not size.
MOST_WORKSPACE = 1 << 30

# B requests, S >= B slots, T rows of a graph, L committed length, n rows of a request


class HostPlan(NamedTuple):
    """Inputs of FlashInfer's planner on the host: int32 tensors for S slots. Slots without a
    request have no rows and one key, which no row reads.
    """

    qo_indptr: Tensor  # [S + 1]
    kv_indptr: Tensor  # [S + 1]
    kv_lens: Tensor  # [S]

    @classmethod
    def of(cls, num_rows: Tensor, prefix_lens: Tensor, slots: int) -> HostPlan:
        """Compute the plan from rows [B] and committed lengths [B] on the host."""
        batch = len(num_rows)
        rows = torch.zeros(slots, dtype=torch.int32)
        keys = torch.ones(slots, dtype=torch.int32)
        rows[:batch] = num_rows
        keys[:batch] = prefix_lens + num_rows
        return cls.of_slots(rows, keys)

    @classmethod
    def of_slots(cls, rows: Tensor, keys: Tensor) -> HostPlan:
        """Compute the plan from the rows and keys [S] of each slot, int32 on the host."""
        return cls(_starts(rows), _starts(keys), keys)

    @property
    def mask_bytes(self) -> int:
        """Bytes of the packed mask: each request's rows times keys, in whole bytes."""
        rows = self.qo_indptr.diff().long()
        return int(((rows * self.kv_lens + 7) // 8).sum())


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def workspace_bytes(
    rows: int, slots: int, *, heads: tuple[int, int], head_dim: int, num_sm: int, by_rows: bool
) -> int:
    """Return the bytes of FlashInfer's float workspace for a graph of T rows and S slots.

    They hold partial outputs of requests whose keys are split into chunks: float32, a vector and a
    number per packed row and query head. Source: ``PrefillPlanImpl`` and ``PrefillSplitQOKVIndptr``
    in FlashInfer's ``scheduler.cuh``.

    Args:
        rows: T.
        slots: S.
        heads: Query heads, KV heads.
        head_dim: Of keys and values.
        num_sm: Multiprocessors of the device.
        by_rows: Whether this FlashInfer counts rows. Older ones reserve a (row, query head) pair
            for each, so as many times more as a group has heads.
    """
    num_heads, kv_heads = heads
    group = num_heads // kv_heads
    longest = (rows - slots + 1) * group
    short = 64 if longest > 16 else 16
    tile = 128 if longest > 64 and head_dim < 256 else short
    tiles = -(-rows * group // tile) + slots - 1
    blocks = max(2 * num_sm // kv_heads, tiles)
    partial_rows = -(-blocks * tile // (group if by_rows else 1))
    vectors = num_heads * partial_rows * head_dim * 4
    return -(-vectors // 16) * 16 + num_heads * partial_rows * 4


def room(backend: Any, tiers: Tiers) -> Callable[[int, int], bool]:
    """Return a test whether a backend's workspace holds a graph of (T rows, S slots). If it does
    not hold all ``tiers``, graphs get a separate workspace, sized for the largest tier up to
    :data:`MOST_WORKSPACE` bytes.
    """
    updater, workspace = backend.indices_updater_prefill, backend.workspace_buffer
    device = torch.cuda.get_device_properties(workspace.device)
    need = functools.partial(
        workspace_bytes,
        heads=(updater.num_qo_heads, updater.num_kv_heads),
        head_dim=updater.head_dim,
        num_sm=device.multi_processor_count,
        by_rows=compat.flashinfer_counts_rows(),
    )
    most = max(need(rows, tiers.slots(rows)) for rows in tiers.all_rows)
    if most > workspace.nbytes:
        workspace = workspace.new_empty(min(most, MOST_WORKSPACE), dtype=torch.uint8)
        attach.write(backend, workspace_buffer=workspace)
        logger.info(
            "C2T: FlashInfer's CUDA graphs of up to %d packed rows have a workspace of %d MiB",
            tiers.all_rows[-1],
            workspace.nbytes >> 20,
        )
    return lambda rows, slots: need(rows, slots) <= workspace.nbytes


class _GraphBuffers(NamedTuple):
    """Buffers that captured kernels read; all tiers share them, since each replay plans anew."""

    qo_indptr: Tensor  # [slots + 1] int32
    kv_indptr: Tensor  # [slots + 1] int32
    kv_indices: Tensor  # [slots * context + rows] int32
    last_page_len: Tensor  # [slots] int32, ones: pages of one token
    mask_indptr: Tensor  # [slots + 1] int32
    mask: Tensor  # [rows * context] uint8, an eighth of it used


class RaggedFlashInferBackend(FlashInferAttnBackend):
    """SGLang's backend, with plans for verify inputs that have a packing."""

    supports_ragged_verify_graph = True
    supports_ragged_verify_eager = True

    _c2t_buffers: _GraphBuffers
    _c2t_wrappers: dict[tuple[int, int], Any]
    """FlashInfer's wrapper for each (S, T)."""

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: Tensor | None = None
    ) -> None:
        """Allocate the graphs' buffers. SGLang would reserve a full context per *row*."""
        device = self.workspace_buffer.device
        if kv_indices_buf is None:
            capacity = max_bs * self.max_context_len + max_num_tokens
            kv_indices_buf = torch.zeros(capacity, dtype=torch.int32, device=device)
        super().init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf)
        starts = lambda: torch.zeros(max_bs + 1, dtype=torch.int32, device=device)  # noqa: E731
        self._c2t_buffers = _GraphBuffers(
            qo_indptr=starts(),
            kv_indptr=starts(),
            kv_indices=kv_indices_buf,
            last_page_len=torch.ones(max_bs, dtype=torch.int32, device=device),
            mask_indptr=starts(),
            mask=self.cuda_graph_custom_mask,
        )
        self._c2t_wrappers = {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan the attention of one replay, or of a capture."""
        packing = packing_of(forward_batch)
        if packing is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        slots, buffers = forward_batch.batch_size, self._c2t_buffers
        key = slots, forward_batch.spec_info.ragged_verify_layout.graph_num_tokens
        if in_capture:
            self._c2t_wrappers[key] = self._graph_wrapper(slots, masked=packing.words is not None)
        wrapper = self._c2t_wrappers[key]
        host = _host_plan(forward_batch, packing)
        self._fill(forward_batch, packing, buffers)
        if in_capture:  # FlashInfer chooses its module and fixes S and T in its own plan
            self._begin(wrapper, host, buffers.kv_indices[:0])
        else:
            # Writes the wrapper's pinned memory. The copy from it that the previous plan started is
            # complete: FlashInfer made SGLang read the committed lengths, which come after it.
            fast_prefill_plan(
                wrapper,
                buffers.qo_indptr[: slots + 1],
                buffers.kv_indptr[: slots + 1],
                buffers.kv_indices[:0],  # already in the kernel's buffer
                buffers.last_page_len[:slots],
                *self._shape(),
                **self._dtypes(),
                qo_indptr_host=host.qo_indptr,
                kv_indptr_host=host.kv_indptr,
                kv_lens_host=host.kv_lens,
                max_q_len=int(packing.host_rows.max()),
                max_kv_len=int(host.kv_lens.max()),
            )
        self.forward_metadata = PrefillMetadata([wrapper], False, False)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager forward."""
        packing = packing_of(forward_batch)
        if packing is None:
            super().init_forward_metadata(forward_batch)
            return
        host, buffers = self.eager_plan(forward_batch, packing)
        wrapper = self.prefill_wrappers_verify[0]
        self._begin(wrapper, host, buffers.kv_indices)
        if packing.words is not None:  # the plan ignores masks; only run() reads these
            attach.write(
                wrapper, _custom_mask_buf=buffers.mask, _mask_indptr_buf=buffers.mask_indptr
            )
        self.forward_metadata = PrefillMetadata([wrapper], False, False)

    def eager_plan(self, forward_batch: Any, packing: Packing) -> tuple[HostPlan, _GraphBuffers]:
        """Compute the inputs of the planner and the kernel for an eager forward."""
        slots, device = forward_batch.batch_size, forward_batch.seq_lens.device
        host = _host_plan(forward_batch, packing)
        empty = lambda size, dtype: torch.empty(size, dtype=dtype, device=device)  # noqa: E731
        buffers = _GraphBuffers(
            qo_indptr=empty(slots + 1, torch.int32),
            kv_indptr=empty(slots + 1, torch.int32),
            kv_indices=empty(int(host.kv_indptr[-1]), torch.int32),
            last_page_len=torch.ones(slots, dtype=torch.int32, device=device),
            mask_indptr=empty(slots + 1, torch.int32),
            mask=empty(host.mask_bytes, torch.uint8),
        )
        self._fill(forward_batch, packing, buffers)
        return host, buffers

    def _begin(self, wrapper: Any, host: HostPlan, kv_indices: Tensor) -> None:
        """Run FlashInfer's own plan; with host tensors it copies nothing back from the device."""
        last_page_len = torch.ones_like(host.kv_lens)
        wrapper.begin_forward(
            host.qo_indptr,
            host.kv_indptr,
            kv_indices,
            last_page_len,
            *self._shape(),
            **self._dtypes(),
            non_blocking=True,
        )

    def _fill(self, forward_batch: Any, packing: Packing, buffers: _GraphBuffers) -> None:
        """Write the inputs of the attention kernel."""
        rows, batch, slots = packing.num_rows, len(packing.num_rows), forward_batch.batch_size
        prefix = forward_batch.seq_lens[:batch]
        pool: Any = self.req_to_token_pool
        indptr(rows, slots, out=buffers.qo_indptr)
        indptr(rows, slots, prefix_lens=prefix, ghost=1, out=buffers.kv_indptr)
        ragged_kv_indices(
            pool.req_to_token,
            forward_batch.req_pool_indices[:batch],
            prefix,
            rows,
            buffers.kv_indptr,
            buffers.kv_indices,
        )
        if packing.words is not None:
            mask_indptr(prefix, rows, slots, out=buffers.mask_indptr)
            pack_tree_mask(packing.words, prefix, rows, buffers.mask_indptr, buffers.mask)

    def _graph_wrapper(self, slots: int, *, masked: bool) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        buffers = self._c2t_buffers
        mask = (
            {"custom_mask_buf": buffers.mask, "mask_indptr_buf": buffers.mask_indptr[: slots + 1]}
            if masked
            else {}
        )
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self.workspace_buffer,
            "NHD",
            use_cuda_graph=True,
            backend=self.prefill_backend,
            qo_indptr_buf=buffers.qo_indptr[: slots + 1],
            paged_kv_indptr_buf=buffers.kv_indptr[: slots + 1],
            paged_kv_indices_buf=buffers.kv_indices,
            paged_kv_last_page_len_buf=buffers.last_page_len[:slots],
            **mask,
        )
        first = next(iter(self._c2t_wrappers.values()), wrapper)
        # 8 MB on the device and 8 MB pinned, each. One pair serves all tiers, because one plan is
        # active at a time.
        attach.write(
            wrapper,
            _int_workspace_buffer=first._int_workspace_buffer,
            _pin_memory_int_workspace_buffer=first._pin_memory_int_workspace_buffer,
        )
        return wrapper

    def _shape(self) -> tuple[Any, Any, Any, int]:
        """Return query heads, KV heads, head size, page size."""
        updater = self.indices_updater_prefill
        return updater.num_qo_heads, updater.num_kv_heads, updater.head_dim, 1

    def _dtypes(self) -> dict[str, Any]:
        updater = self.indices_updater_prefill
        return {"q_data_type": updater.q_data_type, "kv_data_type": updater.data_type}


def _host_plan(forward_batch: Any, packing: Packing) -> HostPlan:
    prefix = forward_batch.seq_lens_cpu[: len(packing.host_rows)]
    return HostPlan.of(packing.host_rows, prefix, forward_batch.batch_size)


def adopt(backend: FlashInferAttnBackend) -> None:
    """Make SGLang's backend of the target verify packed rows. It changes the class, because SGLang
    has already built the backend but not captured its graphs.
    """
    backend.__class__ = RaggedFlashInferBackend


def unsupported_reason(backend: Any) -> str | None:
    """Return why a FlashInfer backend cannot verify packed rows; ``None`` if it can."""
    if backend.num_wrappers != 1:
        return "FlashInfer with sliding windows or cross attention plans two attentions at once"
    if compat.translates_slots(backend):
        return "the KV pool hands out translated slots"
    return None

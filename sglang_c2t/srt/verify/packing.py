"""Packed rows of a verification: their number per request, their sources and destinations.

The number of surviving rows sizes the target's forward, and the gate computes it on the device. So
one number per request travels to the host per verification (:class:`HostSizes`). The transfer
starts when the drafts are judged, and the host waits for it when it lays out the forward. It is the
only transfer that verification adds. CUDA graph tiers, attention plans and recordings all use it.
"""

from __future__ import annotations

import copy
import time
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_c2t.kernels.layout import Layout, lay_out
from sglang_c2t.kernels.masks import ancestor_words_from_parents
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.data_parallel import peers
from sglang_c2t.srt.verify.ragged import PackedLayout
from sglang_c2t.tree import visible_blocks, visible_nodes

# B requests, N most rows of a request, R rows that are verified, T >= R rows of the forward


class HostSizes:
    """[B] integers on their way from the device to the host."""

    def __init__(self, sizes: Tensor) -> None:
        self._arrived: Any = None
        self._host = sizes
        if sizes.is_cuda:
            # Pinned memory from torch's caching allocator, so that the copy does not wait.
            self._host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
            self._host.copy_(sizes, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def awaited(self) -> bool:
        """Whether they come from a device and the host has not seen them arrive."""
        return self._arrived is not None

    @property
    def arrived(self) -> bool:
        """Whether the host can read them without waiting."""
        if self._arrived is not None and self._arrived.query():
            self._arrived = None
        return self._arrived is None

    def wait(self) -> Tensor:
        """Return the sizes on the host; waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._host


def sent(values: Tensor, device: Any) -> Tensor:
    """Copy ``values`` to the device without waiting for it, as pageable memory would."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class Packing:
    """The rows of one verification.

    Args:
        num_rows: [B] integers on the device, rows of each request, in [1, N]; kept as int32.
        width: N.
        total: R, if the host knows it before the individual sizes.
        sizes: ``num_rows`` on the way to the host; ``None`` starts the transfer here.
        parents: [B, N] int64 of trees, see :class:`~sglang_c2t.tree.Trees`; ``None``: chains.
        num_steps: D, the depth of the deepest node.
    """

    def __init__(
        self,
        num_rows: Tensor,
        width: int,
        *,
        total: int | None = None,
        sizes: HostSizes | None = None,
        parents: Tensor | None = None,
        num_steps: int = 0,
    ) -> None:
        # The dtype at capture; another would compile kernels again.
        self.num_rows = num_rows.to(torch.int32)
        self.width = width
        self.parents = parents
        self._num_steps = num_steps
        self._total = total
        self._sizes = HostSizes(self.num_rows) if sizes is None else sizes
        self.arrived: float | None = None
        """When the host got the sizes, if it had to wait (``time.perf_counter``)."""
        self.forwarded_rows = 0
        """T, after the layout; the maximum over the ranks that forward together."""
        self.rows_of_ranks: list[int] | None = None
        """Rows of each of these ranks, after the layout; ``None``: there are no other ranks."""
        self.layout: Layout
        """Set by the layout; its windows are wide enough for N rows and for the longest path."""

    @classmethod
    def full(cls, batch: int, width: int, device: torch.device | str, **trees: Any) -> Packing:
        """Pack all N rows of every request; the host need not wait for sizes."""
        # Filled on both sides: a copy from pageable memory would wait for the device.
        on_host = torch.full((batch,), width, dtype=torch.int32)
        on_device = torch.full((batch,), width, dtype=torch.int32, device=device)
        return cls(on_device, width, sizes=HostSizes(on_host), **trees)

    @cached_property
    def host_rows(self) -> Tensor:
        """[B] int32 on the host. Waits for the device, once."""
        awaited = self._sizes.awaited
        rows = self._sizes.wait().to(torch.int32)
        if awaited:
            self.arrived = time.perf_counter()
        return rows

    @cached_property
    def total(self) -> int:
        """R: verified rows of the batch. Waits for the device unless the host knows it."""
        return int(self.host_rows.sum()) if self._total is None else self._total

    @property
    def rows(self) -> Tensor:
        """[R] int64: indices of the verified rows among B * N, in order."""
        return self.layout.rows[: self.total]

    @property
    def request(self) -> Tensor:
        """[R] int64: request of each verified row."""
        return self.layout.request[: self.total]

    @cached_property
    def words(self) -> Tensor | None:
        """[B, N, W] int64: nodes that each row of a tree sees, as bits; ``None`` for chains."""
        if self.parents is None:
            return None
        return ancestor_words_from_parents(self.parents, self._num_steps)

    def forwarded(self, verify_input: Any, batch: Any, target_runner: Any) -> tuple[Any, Tensor]:
        """Return a copy of the verify input with the T rows of the forward, and their KV slots. T
        is the token tier of a CUDA graph, its last T - R rows padding; otherwise T is R.
        """
        size = _size(target_runner, batch, self.total, len(self.num_rows))
        self.forwarded_rows, self.rows_of_ranks = max(size.of_ranks or [size.rows]), size.of_ranks
        self.layout = lay_out(
            self.num_rows,
            verify_input.draft_token,
            verify_input.positions,
            batch.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            tokens=size.rows,
            slots=size.slots,
            places=max(self.width, verify_input.max_tree_depth),
        )
        packed = copy.copy(verify_input)
        packed.draft_token, packed.positions = self.layout.input_ids, self.layout.positions
        packed.custom_mask = self._mask_of_bools() if self.num_rows.is_cpu else None
        packed.ragged_verify_layout = PackedLayout.of(self.layout)
        return packed, self.layout.out_cache_loc

    def rotated(self, positions: Tensor) -> Tensor:
        """[3, T] int64: M-RoPE positions [3, B * N] of the forward's rows, 0 on padding."""
        # Padding is row B * N.
        return torch.nn.functional.pad(positions, (0, 1))[:, self.layout.rows]

    def _mask_of_bools(self) -> Tensor | None:
        """[sum(n_b * n_b)] bool for CPU attention; ``None`` for chains, which are causal."""
        if self.parents is None:
            return None
        return visible_blocks(visible_nodes(self.parents, self._num_steps), self.num_rows)


def tiers_of(target_runner: Any) -> Tiers | None:
    """Return the token tiers of the target's CUDA graphs; ``None`` without such graphs."""
    return getattr(target_runner.decode_cuda_graph_runner, "tiers", None)


class _Size(NamedTuple):
    """Size of a forward."""

    rows: int
    """T."""

    slots: int
    """S."""

    of_ranks: list[int] | None = None
    """T of each rank that forwards together with this one."""


def _size(target_runner: Any, batch: Any, rows: int, requests: int) -> _Size:
    """Return the size for R ``rows`` of B ``requests``: a graph's, or unpadded if eager. Ranks that
    forward together replay one graph, which holds the most rows of any rank.
    """
    tiers, together = tiers_of(target_runner), peers()
    if together is None:
        tier = None if tiers is None else tiers.pick(rows, requests)
        return _Size(rows, requests) if not tier or not tiers else _Size(tier, tiers.slots(tier))
    everyones = together.of_all(rows, requests)
    most_rows, most_requests = map(max, zip(*everyones, strict=True))
    if tiers is not None and batch.can_run_decode_cuda_graph:
        tier = tiers.pick(most_rows, most_requests, alone=False)
        if tier is not None:
            return _Size(tier, tiers.slots(tier), [tier] * len(everyones))
    return _Size(rows, requests, [theirs for theirs, _ in everyones])

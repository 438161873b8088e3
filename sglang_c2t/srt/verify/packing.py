"""A verification's packed rows: how many per request, where they come from, where they go.

What the target forwards is sized by how many rows survive, and the gate knows that on the
device. So one number per request travels to the host per verification (:class:`HostSizes`),
started as soon as the drafts are judged and awaited where the forward is laid out. It is the
only transfer that verification adds, and it serves all that needs sizes: the token tier of
the CUDA graph, attention plans, recordings.
"""

from __future__ import annotations

import copy
import time
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.kernels.masks import ancestor_words_from_parents
from sglang_c2t.kernels.rows import (
    PackedInputs,
    PackedRows,
    block_of,
    pack_inputs,
    packed_rows,
    scatter_rows,
)
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt import compat
from sglang_c2t.tree import visible_blocks, visible_nodes

# B requests, N most rows of a request, R rows that are verified, T >= R rows of the forward


class HostSizes:
    """[B] integers that the device may still be computing, on their way to the host."""

    def __init__(self, sizes: Tensor) -> None:
        self._arrived: Any = None
        self._host = sizes
        if sizes.is_cuda:
            # Pinned memory from torch's caching allocator, so that the copy waits for nobody.
            self._host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
            self._host.copy_(sizes, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def transferred(self) -> bool:
        """Whether they come from a device, so that the host may have to wait."""
        return self._arrived is not None

    def wait(self) -> Tensor:
        """The sizes on the host, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


class Packing:
    """The rows of one verification.

    Args:
        num_rows: [B] integers on the device, rows of each request, in [1, N]; kept as int32.
        width: N.
        sizes: ``num_rows`` on the way to the host; ``None`` starts the transfer here.
        parents: [B, N] int64 of trees, see :class:`~sglang_c2t.tree.Trees`; ``None``: chains.
        num_steps: D, the depth of the deepest node.
    """

    def __init__(
        self,
        num_rows: Tensor,
        width: int,
        *,
        sizes: HostSizes | None = None,
        parents: Tensor | None = None,
        num_steps: int = 0,
    ) -> None:
        # One dtype, as at capture: kernels are compiled anew for another.
        self.num_rows = num_rows.to(torch.int32)
        self.width = width
        self.parents = parents
        self._num_steps = num_steps
        self._sizes = HostSizes(self.num_rows) if sizes is None else sizes
        self.arrived: float | None = None
        """When the host learnt the sizes, if it had to wait (``time.perf_counter``)."""
        self.forwarded_rows = 0
        """T, once the forward is laid out."""

    @classmethod
    def full(cls, batch: int, width: int, device: torch.device | str, **trees: Any) -> Packing:
        """All N rows of every request; nothing to wait for."""
        # Made on both sides: a copy from pageable memory would wait for the device.
        on_host = torch.full((batch,), width, dtype=torch.int32)
        on_device = torch.full((batch,), width, dtype=torch.int32, device=device)
        return cls(on_device, width, sizes=HostSizes(on_host), **trees)

    @cached_property
    def host_rows(self) -> Tensor:
        """[B] int32 on the host. Waits for the device, once."""
        rows = self._sizes.wait().to(torch.int32)
        if self._sizes.transferred:
            self.arrived = time.perf_counter()
        return rows

    @cached_property
    def total(self) -> int:
        """R."""
        return int(self.host_rows.sum())

    @property
    def rows(self) -> Tensor:
        """[R] int64: which of the B * N rows are verified, in order."""
        return self._verified.rows

    @property
    def request(self) -> Tensor:
        """[R] int64: which of the B requests each of them belongs to."""
        return self._verified.request

    @cached_property
    def _verified(self) -> PackedRows:
        return packed_rows(self.num_rows, self.width, self.total)

    @cached_property
    def words(self) -> Tensor | None:
        """[B, N, W] int64: what each row of a tree sees, as bits; ``None`` for chains."""
        if self.parents is None:
            return None
        return ancestor_words_from_parents(self.parents, self._num_steps)

    def forwarded(self, verify_input: Any, batch: Any, target_runner: Any) -> tuple[Any, Tensor]:
        """A copy of the verify input [B * N] with the rows of the forward [T], and their KV slots.

        T is the token tier of a CUDA graph, its last T - R rows padding; or R.
        """
        from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

        tier = _tier(target_runner, self.total, len(self.num_rows)) or self.total
        self.forwarded_rows = tier
        inputs: PackedInputs = pack_inputs(
            self.num_rows,
            verify_input.draft_token,
            verify_input.positions,
            batch.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            tier,
        )
        packed = copy.copy(verify_input)
        packed.draft_token, packed.positions = inputs.input_ids, inputs.positions
        packed.custom_mask = self._mask_of_bools() if inputs.input_ids.is_cpu else None
        packed.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=self.num_rows, graph_num_tokens=tier
        )
        packed.c2t_packing = self
        return packed, inputs.out_cache_loc

    def rotated(self, positions: Tensor) -> Tensor:
        """[3, T] int64: M-RoPE positions [3, B * N] of the rows of the forward, 0 on padding."""
        rows = packed_rows(self.num_rows, self.width, self.forwarded_rows).rows
        return torch.nn.functional.pad(positions, (0, 1))[:, rows]  # padding is row B * N

    def _mask_of_bools(self) -> Tensor | None:
        """Trees: [sum(n_b * n_b)] bool, which CPU attention reads; chains are causal."""
        if self.parents is None:
            return None
        return visible_blocks(visible_nodes(self.parents, self._num_steps), self.num_rows)


def packing_of(forward_batch: Any) -> Packing | None:
    """The packing of a verify forward; ``None`` for any other forward."""
    return getattr(getattr(forward_batch, "spec_info", None), "c2t_packing", None)


def warm_up(
    target_runner: Any,
    draft_runner: Any,
    width: int,
    max_requests: int,
    *,
    trees: bool,
    num_steps: int,
) -> None:
    """Compile what packed verification launches outside of graphs, for every batch size, before
    a request has to wait for it. What the gate launches has been compiled when graphs were
    captured.
    """
    device = target_runner.device
    for batch in one_of_each(max_requests):
        rows = torch.ones(batch, dtype=torch.int32, device=device)
        zeros = torch.zeros(batch * width, dtype=torch.int64, device=device)
        parents = zeros.view(batch, width) - 1 if trees else None
        packing = Packing(rows, width, parents=parents, num_steps=num_steps)
        requests = SimpleNamespace(
            req_to_token_pool=target_runner.req_to_token_pool,
            req_pool_indices=zeros[:batch],
            seq_lens=zeros[:batch],
        )
        packing.forwarded(
            SimpleNamespace(draft_token=zeros, positions=zeros), requests, target_runner
        )
        _ = packing.rows, packing.words
        if compat.is_flashinfer(target_runner.attn_backend):
            requests.batch_size, requests.seq_lens_cpu = batch, torch.zeros(batch)
            target_runner.attn_backend.eager_plan(requests, packing)
        if not trees:
            for columns, dtype in _unpacked_tables(target_runner, draft_runner):
                scatter_rows(torch.zeros((batch, columns), dtype=dtype, device=device), rows, width)
    if (tiers := tiers_of(target_runner)) is not None:
        _warm_up_layouts(tiers, device)


def one_of_each(most: int) -> list[int]:
    """Of the numbers from 1 to ``most`` one for each way in which Triton may compile for it: 1,
    multiples of 16 and all else are kernels of their own, and so are blocks of 1, 2, 4, ...
    """
    kinds: dict[tuple[int, bool, bool], int] = {}
    for number in range(1, most + 1):
        kinds.setdefault((block_of(number), number == 1, number % 16 == 0), number)
    return list(kinds.values())


def _unpacked_tables(target_runner: Any, draft_runner: Any) -> list[tuple[int, torch.dtype]]:
    """Columns and dtype of what :func:`scatter_rows` brings back: hidden states as wide as the
    draft reads them, and logits.
    """
    hidden = compat.target_hidden_width(draft_runner)
    return [
        (hidden, target_runner.dtype),
        (target_runner.model_config.vocab_size, torch.float32),
    ]


def _warm_up_layouts(tiers: Tiers, device: Any) -> None:
    """SGLang's kernels that pad a layout to the slots of its tier, at each replay."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    kinds: dict[tuple[object, ...], tuple[int, int, int]] = {}
    for rows in tiers.rows:
        slots = tiers.slots(rows)
        for batch in one_of_each(slots):
            kind = block_of(slots), *((n == 1, n % 16 == 0) for n in (batch, slots, rows))
            kinds.setdefault(kind, (batch, slots, rows))
    for batch, slots, rows in kinds.values():
        RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=torch.ones(batch, dtype=torch.int32, device=device), graph_num_tokens=rows
        ).padded_to_bucket(padded_bs=slots, cap=tiers.width)


def tiers_of(target_runner: Any) -> Tiers | None:
    """The token tiers of the target's CUDA graphs; ``None`` without such graphs."""
    return getattr(target_runner.decode_cuda_graph_runner, "tiers", None)


def _tier(target_runner: Any, rows: int, requests: int) -> int | None:
    """T for R ``rows`` of B ``requests``; ``None``: they run eagerly, unpadded."""
    tiers = tiers_of(target_runner)
    return None if tiers is None else tiers.pick(rows, requests)

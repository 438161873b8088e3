"""CUDA graphs of the target's verification, captured per token tier instead of per batch size.

SGLang's decode graph runner can do that for DSPARK, with inputs packed and padded to a tier and a
``RaggedVerifyLayout`` of rows per request. The subclass here overrides the parts specific to
DSPARK: the tiers, and the layout in the captured batch. A verify batch without a layout, or too
large for every tier, runs eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

from sglang_c2t.config import ConfigError
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.data_parallel import peers
from sglang_c2t.srt.verify.packed import PackedVerifyInput
from sglang_c2t.srt.verify.packing import HostSizes, Packing

logger = logging.getLogger(__name__)

_TOO_SMALL = "FlashInfer's workspace has room for"
_HOW_TO_RAISE = "SGLANG_FLASHINFER_WORKSPACE_SIZE (bytes) makes it larger"

# T rows of a tier, S its request slots


class TieredGraphRunner(DecodeCudaGraphRunner):
    """The target's verify graphs, one per tier."""

    #: Set on a subclass: see :class:`~sglang_c2t.plan.tiers.Tiers`.
    rows_per_slot = 1
    max_rows: int | None = None

    #: Set on a subclass: whether rows attend along trees, by custom masks.
    trees = False

    tiers: Tiers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with (
            attach.swapped(
                decode_cuda_graph_runner, "ragged_verify_compact_graphs_enabled", lambda _: True
            ),
            attach.swapped(
                decode_cuda_graph_runner,
                "get_batch_sizes_to_capture",
                _one_slot_more(decode_cuda_graph_runner.get_batch_sizes_to_capture),
            ),
        ):
            super().__init__(*args, **kwargs)
        compat.plan_every_replay(self)

    def _build_ragged_verify_token_buckets(self) -> list[int]:
        wanted = Tiers(
            max(self.capture_bs),
            self.captured_req_width,
            max_rows=self.max_rows,
            rows_per_slot=self.rows_per_slot,
        )
        self.tiers = replace(wanted, admits=self._admits(wanted))
        if not self.tiers.rows:
            raise ConfigError(f"{_TOO_SMALL} no CUDA graph of packed rows: {_HOW_TO_RAISE}")
        if self._room(wanted) is not None and self.tiers.rows != self.tiers.all_rows:
            logger.warning(
                "C2T: %s CUDA graphs of up to %d packed rows, of %d; larger batches verify "
                "without a graph. %s",
                _TOO_SMALL,
                max(self.tiers.rows),
                max(self.tiers.all_rows),
                _HOW_TO_RAISE,
            )
        # SGLang checks next whether it must refuse adapters, see `adapters.py`.
        if compat.lora_manager(self.model_runner) is not None:
            self.ragged_verify_mode = False
        return self.tiers.rows

    def maybe_init_pdmux(self) -> None:
        """Restore the mode that SGLang's check has read; this is the next method that it calls."""
        self.ragged_verify_mode = self.capture_num_tokens is not None
        super().maybe_init_pdmux()

    def _admits(self, wanted: Tiers) -> Callable[[int, int], bool] | None:
        """Return a test whether a tier can have a graph; ``None``: all can."""
        room, together = self._room(wanted), peers()
        if together is None or together.rows_divide_by == 1:
            return room
        return lambda rows, slots: (
            rows % together.rows_divide_by == 0 and (room is None or room(rows, slots))
        )

    def _room(self, wanted: Tiers) -> Callable[[int, int], bool] | None:
        """A test whether attention has memory for a tier; ``None`` if its backend has no limit."""
        if not compat.is_flashinfer(self.attn_backend):
            return None
        from sglang_c2t.srt.verify import flashinfer as flashinfer_verify

        return flashinfer_verify.room(self.attn_backend, wanted)

    def _autotune_buffers(self) -> tuple[Any, int]:
        """Return buffers for SGLang's dummy forward, and its batch size B: N rows per request.
        ``max_rows`` may allow fewer rows than N for each of ``max_bs``.
        """
        buffers, requests = super()._autotune_buffers()
        width = self.captured_req_width
        if self.max_num_token >= width:
            return buffers, min(requests, self.max_num_token // width)
        return self._alloc_dummy_decode_buffers(1, num_tokens_per_req=width), 1

    def _ragged_capture_slots(self, num_tokens: int) -> int:
        return self.tiers.slots(num_tokens)

    def _can_run_ragged_verify_graph(self, forward_batch: Any, ragged_layout: Any) -> bool:
        """Whether rows were laid out for a graph. SGLang would also accept others for the next
        tier, in which their padding has no slot.
        """
        tier = ragged_layout.graph_num_tokens in self.tiers.rows
        return tier and bool(super()._can_run_ragged_verify_graph(forward_batch, ragged_layout))

    def _stage_ragged_verify_layout(self, *_: Any) -> None:
        """Do nothing: attention plans each replay itself, and no graph reads the captured layout.
        Graphs of targets with recurrent state would.
        """

    def _capture_one_stream(self, *args: Any, **kwargs: Any) -> None:
        """Capture one graph per tier; SGLang captures full widths of ``capture_bs`` requests."""
        with (
            attach.swapped(self, "capture_bs", self.tiers.rows),
            attach.swapped(self, "captured_req_width", 1),
        ):
            super()._capture_one_stream(*args, **kwargs)

    def get_spec_info(self, num_tokens: int) -> Any:
        """Return the verify input for a capture: T rows over S requests."""
        spec_info = super().get_spec_info(num_tokens)
        layout = self._layout(num_tokens)
        parents = None
        if self.trees:  # trees of depth 1: a replay brings its own
            parents = torch.zeros((layout.bs, self.tiers.width), dtype=torch.int64)
            parents[:, 0] = -1
            parents = parents.to(self.device)
        packing = Packing(
            layout.verify_lens,
            self.tiers.width,
            sizes=HostSizes(torch.tensor(layout.verify_lens_cpu, dtype=torch.int32)),
            parents=parents,
            num_steps=1,
        )
        captured = PackedVerifyInput.of(spec_info, packing=packing)
        attach.write(captured, custom_mask=None, ragged_verify_layout=layout)
        return captured

    def _layout(self, num_tokens: int) -> RaggedVerifyLayout:
        # SGLang's runner keeps it: a captured graph may read it, and replays refresh it in place.
        if num_tokens not in self._captured_ragged_layouts:
            self._captured_ragged_layouts[num_tokens] = RaggedVerifyLayout.from_verify_lens(
                verify_lens_cpu=build_capture_verify_lens(
                    num_tokens=num_tokens,
                    num_slots=self.tiers.slots(num_tokens),
                    num_draft_tokens=self.tiers.width,
                ),
                device=self.device,
                grid=[num_tokens],
            )
        return self._captured_ragged_layouts[num_tokens]  # type: ignore[return-value]


def _one_slot_more(stock: Any) -> Any:
    """``get_batch_sizes_to_capture`` with one more slot than the largest batch, for padding."""

    def sizes(*args: Any, **kwargs: Any) -> Any:
        capture_bs, compile_bs = stock(*args, **kwargs)
        return [*capture_bs[:-1], capture_bs[-1] + 1], compile_bs

    return sizes


def use_stock(target_runner: Any) -> None:
    """Undo :func:`use_tiers`, and capture SGLang's graphs if there were any."""
    for name in _OURS:
        delattr(target_runner, name)
    if target_runner.decode_cuda_graph_runner is not None:
        target_runner.init_decode_cuda_graph()


#: Attributes with which :func:`use_tiers` overrides methods of SGLang's runner.
_OURS = "_decode_cuda_graph_runner_cls", "max_decode_logits_rows"


def use_tiers(target_runner: Any, *, trees: bool, max_rows: int | None) -> None:
    """Make the target capture :class:`TieredGraphRunner` graphs instead of SGLang's."""
    attributes = {"trees": trees, "rows_per_slot": 2 if trees else 1, "max_rows": max_rows}
    runner_class = type("C2TGraphRunner", (TieredGraphRunner,), attributes)
    stock_rows = target_runner.max_decode_logits_rows
    attach.write(
        target_runner,
        _decode_cuda_graph_runner_cls=lambda: runner_class,
        # Includes the slot that `_one_slot_more` adds.
        max_decode_logits_rows=lambda: stock_rows() + target_runner.decode_num_tokens_per_req(),
    )

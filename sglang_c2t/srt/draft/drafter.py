"""A drafter: makes a server's drafts, from the plan of a step to its verify input. The planner
plans a step before it drafts. The step travels on SGLang's draft input to the draft loop, and on
the verify input to verification and draft extend. SGLang's own functions are called ``stock`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.draft.gate import Gate
from sglang_c2t.plan.step import StepKind
from sglang_c2t.srt import attach
from sglang_c2t.srt.draft.host import Host, Rows, step_of
from sglang_c2t.srt.draft.pending import PendingTokens
from sglang_c2t.srt.draft.planning import Planning, Step
from sglang_c2t.srt.draft.requests import Requests, slots_of

# B requests


class Drafter:
    """Drafts the steps of one server. It owns the gate, the running requests, and the planning in
    charge. A subclass defines the draft loop (:meth:`loop`) and the verify input (:meth:`build`).
    """

    planning: Planning
    """Plans the steps of a policy with a planner."""

    gating: Planning
    """Plans the steps that a gate decides, and those that are recorded."""

    packed = False
    """Whether the target forwards surviving rows only; otherwise N rows per request."""

    captured_planning: Planning | None = None
    """The planning whose tables the draft graphs write, in charge or not."""

    def __init__(self, host: Host, gate: Gate) -> None:
        self.host, self.gate = host, gate
        self.pending = PendingTokens(host.num_steps + 1)
        self.requests = Requests(gate, host.num_slots, self.pending)

    def serve(self, planning: Planning, gating: Planning, *, packed: bool) -> None:
        """Plan the next steps with ``planning``, or with ``gating`` if they are recorded."""
        self.planning, self.gating, self.packed = planning, gating, packed

    def capture(self, stock: Callable[[], None]) -> None:
        """Capture CUDA graphs for steps without recording."""
        planning = self.planning
        self.captured_planning = planning if planning.plans else None
        with (
            attach.swapped(self.gate, "exploring", False),
            attach.swapped(self.gate.served, "capturing", True),
        ):
            self.host.capture(stock, all_lengths=planning.plans)

    # -- a step -------------------------------------------------------------------------------

    def draft(self, batch: Any, stock: Callable[[], Any]) -> Any:
        """Plan the next step and draft it; returns its verify input."""
        if batch.forward_mode.is_idle():
            # Draft as many layers as the ranks with requests.
            with self.host.drafting(self.host.agreed_layers(self.host.num_steps)):
                return stock()
        step = self._begin(batch)
        build = partial(self.build, step)
        # Without layers only the verify input is made.
        layers = max(step.plan.num_layers, 1)
        with self.host.drafting(layers, build, eager=self.gate.exploring):
            return stock()

    def draft_forward(self, forward_batch: Any, stock: Callable[[], Any]) -> Any:
        """Run SGLang's draft loop, also inside a CUDA graph."""
        if forward_batch.forward_mode.is_idle():
            return stock()
        step = step_of(forward_batch)
        drafted = self.loop(step, forward_batch.req_pool_indices, stock)
        if step is not None:
            step.layers_end()
        return drafted

    def loop(self, step: Step | None, slots: Tensor, stock: Callable[[], Any]) -> Any:
        """Draft for the requests in ``slots`` [B]; during a capture there is no step."""
        raise NotImplementedError

    def build(self, step: Step, stock: Callable[[], Any], batch: Any, *drafted: Any) -> Any:
        """Build the verify input of a ``step``; see :meth:`Host.drafting`."""
        raise NotImplementedError

    def extend_prefill(self, batch: Any, stock: Callable[[], Any]) -> Any:
        """Run draft extend after prefill, and score the first draft of each request."""
        if batch.forward_mode.is_idle():
            return stock()
        result, rows = self.host.last_rows(stock)
        self.requests.admit(batch)
        self.gate.join(batch.req_pool_indices, *rows)
        return result

    def extend_decode(self, batch: Any, result: Any, stock: partial[None]) -> None:
        """Run draft extend after verification, and score the next first draft of each request."""
        step = getattr(batch.spec_info, "step", None)
        if step is not None and step.draft_free:
            rows = self._extend_draft_free(step, batch, result, stock)
            if rows is None:
                return
        else:
            rows = self.host.extend(stock, batch, result)
        if batch.forward_mode.is_idle():
            return
        assert rows is not None
        self.requests.scored()
        # A graph scores the first layer of every step.
        uniform = step is not None and step.plan.kind is StepKind.UNIFORM
        later = uniform and not self.host.drafts_in_graphs
        self.gate.relay_first_token(batch.req_pool_indices, *rows, later=later)

    def _extend_draft_free(
        self, step: Step, batch: Any, result: Any, stock: partial[None]
    ) -> Rows | None:
        """Keep the tokens of a draft-free step. At the end of a burst run draft extend for all of
        its tokens, and return the last rows; otherwise ``None``.
        """
        slots = slots_of(batch)
        self.pending.add(slots, *self.host.roots_of(batch, result))
        # A request that opted out is promised full drafts.
        if not (step.ends_burst or step.full or self.pending.full):
            self.host.keep_draft_input(step.draft_input, result)
            return None
        step.layers_begin()
        for window in self.pending.take(slots):
            if step.extends and step.start.on_cuda:
                # FlashInfer plans each draft extend in pinned memory, from which its copy to the
                # device must have ended before the next plan.
                torch.cuda.current_stream().synchronize()
            rows = self.host.extend_pending(stock, batch, result, window)
            step.extends += 1
        step.layers_end()
        return rows

    def _begin(self, batch: Any) -> Step:
        """Plan the next step. It travels on the draft input."""
        step, requests = step_of(batch), self.requests
        agreed_layers = partial(self.host.agreed_layers, requests=len(batch.reqs))
        if step is not None and step.plan.kind is StepKind.WARMUP:  # of dummy requests
            agreed_layers(step.plan.num_layers)
            return step
        full, unmeasured = requests.opted_out(batch), requests.unscored(batch)
        # With overlap it lags by a step or two; only costs depend on it.
        context = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
        planning = self.gating if self.gate.exploring else self.planning
        step = batch.spec_info.c2t_step = planning.begin(
            len(batch.reqs),
            context=context or batch.seq_lens_sum,
            full=full,
            constrained=requests.constrained(batch),
            unmeasured=unmeasured,
            pending=self.pending.any(slots_of(batch)),
            may_skip_drafts=self.host.may_skip_drafts,
            agreed_layers=partial(agreed_layers, all_of_them=bool(full)),
        )
        if step.draft_free:
            step.draft_input = batch.spec_info
        return step

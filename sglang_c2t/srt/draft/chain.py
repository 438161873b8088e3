"""SGLang's draft workers, cutting chains.

Instead of exiting early, a planned step drafts as many layers as its plan says (``lengths.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.plan.step import StepKind
from sglang_c2t.srt import attach
from sglang_c2t.srt.draft.extend import extend_over_accepted
from sglang_c2t.srt.draft.planning import Step
from sglang_c2t.srt.draft.watcher import DraftWatcher, no_forward, step_of, timed_layer
from sglang_c2t.srt.hooks.reporting import COUNTERS, GATE_CLOCK
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.packing import Packing

# B requests, D layers, N rows of a full chain


class ChainDraftMixin(DraftWatcher):
    """Cuts chains."""

    gate: ChainGate

    exact = True
    """Whether drafts are accepted by sampling and matching, as thresholds of 1 ask for."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Also make room for the lengths, where CUDA graphs can write them."""
        super().alloc_memory_pool(*args, **kwargs)
        slots = self.req_to_token_pool.req_to_token.shape[0]
        self._lens = torch.ones(slots, dtype=torch.int32, device=self.device)

    def draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Draft chains; each ends where the plan's rows or its gate end it."""
        if batch.forward_mode.is_idle():
            return self._draft_idle(partial(super().draft, batch, *args, **kwargs))
        step, most = self._begin_step(batch), self.lengths.most
        build = eagle_worker_v2.build_eagle_verify_input

        def build_full(*args: Any, **kwargs: Any) -> Any:
            """Chains are of D layers however many are drafted."""
            return build(*args, **{**kwargs, "num_steps": most})

        with (
            self._eager_if_recorded(),
            self.lengths.drafting(step.plan.num_layers),
            attach.swapped(eagle_worker_v2, "build_eagle_verify_input", build_full),
        ):
            verify_input = super().draft(batch, *args, **kwargs)
        return self._cut(verify_input, step)

    def _cut(self, verify_input: Any, step: Step) -> ChainVerifyInput:
        """The chains, cut to what is verified of each."""
        plan, batch, width = step.plan, step.batch, verify_input.draft_token_num
        links = total = None
        if plan.kind is StepKind.FIXED:
            lens = self.gate.agreed(self._lens[:batch])
        elif plan.kind is StepKind.UNIFORM:
            each, total = 1 + plan.num_layers, plan.row_budget
            lens = torch.full((batch,), each, dtype=torch.int32, device=self.device)
        else:
            lens, links, total = self.planning.selector.select(step, agreed=self.gate.agreed)
        chains = ChainVerifyInput.cut(verify_input, lens, links, exact=self.exact, step=step)
        if total == batch * width:
            chains.packing = Packing.full(batch, width, lens.device)
        elif self.packed:
            chains.packing = Packing(chains.verify_lens, width, total=total)
        return chains

    def draft_forward(self, forward_batch: Any) -> Any:
        """SGLang's draft loop, scored by the gate unless the step is uniform."""
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        step = step_of(forward_batch)
        if step is not None and step.plan.kind is StepKind.UNIFORM:
            with self._watching(timed_layer):
                drafted = super().draft_forward(forward_batch)
        else:
            drafted = self._drafted_and_scored(forward_batch)
        if step is not None:
            step.layers_end()
        # Layers that were not drafted lie after every cut.
        parents, scores, tokens, probs = drafted
        drafts = self.speculative_num_draft_tokens - 1
        tokens = torch.nn.functional.pad(tokens, (0, drafts - tokens.shape[1]))
        return parents[:, :drafts], scores[:, :drafts], tokens, probs

    def _drafted_and_scored(self, forward_batch: Any) -> Any:
        """SGLang's draft loop, with the gate asked after each layer."""
        with GATE_CLOCK:
            self.gate.begin(forward_batch.req_pool_indices)
        with self._watching(self._draft_layer):
            drafted = super().draft_forward(forward_batch)
        if self.gate.planned and self.gate.program is not None:
            self.planning.selector.scored(self.gate.confidences)
        if self.gate.cuts:
            self._lens[: len(forward_batch.req_pool_indices)] = self.gate.verify_lens
        return drafted

    def _draft_extend_for_decode(
        self, batch: Any, batch_result: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Extend the draft over what was accepted, see :func:`extend_over_accepted`."""
        stock = super()._draft_extend_for_decode
        extend_over_accepted(self, stock, batch, batch_result, *args, **kwargs)

    def _draft_layer(self, forward_batch: Any, run: Callable[[], Any]) -> Any:
        # Reads the host once per layer: free on a CPU; on a GPU one wait for a tiny
        # kernel, which buys a whole draft forward whenever the batch has stopped.
        # Other ranks that forward with this one would wait for it.
        may_skip = not self.gate.planned and self._reads_host and self.peers is None
        if may_skip and not self.gate.any_alive():
            COUNTERS.draft_forwards_skipped += 1
            return no_forward(forward_batch)
        output = timed_layer(forward_batch, run)
        logits_output = output.logits_output
        with GATE_CLOCK:
            self.gate.observe(logits_output.next_token_logits, logits_output.hidden_states)
        return output


class C2TEagleDraftWorker(ChainDraftMixin, EagleDraftWorker):
    """Gated draft worker of EAGLE, EAGLE3 and NEXTN."""


class C2TStandaloneDraftWorker(ChainDraftMixin, StandaloneDraftWorker):
    """Gated draft worker of STANDALONE."""

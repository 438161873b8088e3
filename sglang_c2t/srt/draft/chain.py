"""Drafts chains, and cuts them to the verified drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.plan.step import StepKind
from sglang_c2t.srt.draft.drafter import Drafter
from sglang_c2t.srt.draft.host import DraftForward, Host
from sglang_c2t.srt.draft.planning import Step
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.packing import Packing

# B requests, N rows of a full chain


class ChainDrafter(Drafter):
    """Drafts chains; the plan's rows or the gate end each one. It owns the lengths that the gate
    computes in the draft loop. ``exact`` is for the verify input.
    """

    gate: ChainGate

    def __init__(self, host: Host, gate: ChainGate, *, exact: bool = True) -> None:
        super().__init__(host, gate)
        self._exact = exact
        # [slots]; a step's CUDA graph writes the first B.
        self._lens = torch.ones(host.num_slots, dtype=torch.int32, device=host.device)

    def loop(self, step: Step | None, slots: Tensor, stock: Callable[[], Any]) -> Any:
        """Run the draft loop; the gate scores each layer, unless the step is uniform."""
        if step is not None and step.plan.kind is StepKind.UNIFORM:
            return self.host.chains(stock, DraftForward.run)
        gate = self.gate
        gate.begin(slots)
        drafted = self.host.chains(stock, self._score)
        if gate.planned and gate.program is not None:
            self.planning.selector.scored(gate.confidences)
        if gate.cuts:
            self._lens[: len(slots)] = gate.verify_lens
        return drafted

    def _score(self, layer: DraftForward) -> None:
        """Run the draft model and score its drafts, or skip it once all chains have ended."""
        # Waits for the device once per layer: free on a CPU. On a GPU the wait for a tiny kernel
        # saves a full draft forward whenever the batch has stopped. Ranks that forward together do
        # not skip.
        host, gate = self.host, self.gate
        may_skip = not gate.planned and not host.capturing and host.peers is None
        if may_skip and not gate.any_alive():
            layer.skip()
            return
        rows = layer.run()
        gate.observe(*rows)

    def build(self, step: Step, stock: Callable[[], Any], *_drafted: Any) -> ChainVerifyInput:
        """Build SGLang's full chains, cut to the verified drafts."""
        full, plan, batch = stock(), step.plan, step.batch
        width = full.draft_token_num
        links = total = None
        if plan.kind is StepKind.FIXED:
            lens = self.gate.agreed(self._lens[:batch])
        elif plan.kind is StepKind.UNIFORM:
            each, total = 1 + plan.num_layers, plan.row_budget
            lens = torch.full((batch,), each, dtype=torch.int32, device=self.host.device)
        else:
            lens, links, total = self.planning.selector.select(step, agreed=self.gate.agreed)
        chains = ChainVerifyInput.cut(full, lens, links, exact=self._exact, step=step)
        if total == batch * width:
            chains.packing = Packing.full(batch, width, lens.device)
        elif self.packed:
            chains.packing = Packing(chains.verify_lens, width, total=total)
        return chains

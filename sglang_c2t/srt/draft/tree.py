"""Grows trees, and cuts each to the nodes that are verified.

SGLang's draft loop returns a 4-tuple. It is batch-major, because CUDA graphs slice it:

    parent_list       [B, N, 3]  parents, depths and sources of the trees' nodes
    top_scores_index  [B, N]     the nodes' keys
    draft_tokens      [B, N]     their tokens, roots not filled in
    draft_probs       None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.plan.step import StepKind
from sglang_c2t.srt.draft.drafter import Drafter
from sglang_c2t.srt.draft.host import DraftForward
from sglang_c2t.srt.draft.planning import Step
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.tree import TreeVerifyInput, build_verify_input
from sglang_c2t.tree import Trees

# B requests, N nodes of a tree


class TreeDrafter(Drafter):
    """Grows trees with the gate's policy."""

    gate: TreeGate

    def loop(self, step: Step | None, slots: Tensor, stock: Callable[[], Any]) -> Any:
        """Run the draft loop; the gate scores each layer and chooses the next rows."""
        if step is not None and step.draft_free:
            return self._roots(len(slots))
        self.gate.begin(slots)
        return self.host.trees(stock, self._score, self.gate, self._organize)

    def _score(self, layer: DraftForward) -> None:
        """Run the draft model and score its drafts, or skip it once no tree grows."""
        # Waits for the device once per layer, as for chains.
        gate, token_map = self.gate, self.host.token_map
        if self.host.capturing or gate.any_alive():
            logits, hidden = layer.run()
        else:
            logits, hidden = layer.skip(choices=gate.topk)
            token_map = None  # the choices are no token ids
        judged = gate.observe(logits, hidden, token_map)
        if judged is not None:
            # The gate has already chosen: SGLang's softmax and top-K run over K numbers, which the
            # gate does not read.
            layer.replace(judged.prob, hidden)

    def _organize(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of the loop, see the top of the file."""
        trees, keys = self.gate.finish()
        links = torch.stack((trees.parents, trees.depth, trees.source), dim=2)
        return links, keys, trees.tokens

    def _roots(self, batch: int) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the results of a loop that drafts nothing."""
        nodes = torch.zeros(
            (batch, self.gate.num_nodes), dtype=torch.int64, device=self.host.device
        )
        links = torch.stack((nodes - 1, nodes, nodes), dim=2)
        return links, nodes.to(torch.float32), nodes, None

    def build(self, step: Step, _stock: Callable[[], Any], *drafted: Any) -> TreeVerifyInput:
        """Build the verify input of the trees, cut to the verified nodes."""
        batch, draft_input, links, keys, tokens, *_ = drafted
        parents, depth, source = links.unbind(dim=2)
        full = Trees(tokens, parents, depth, (parents >= 0).sum(dim=1) + 1, source)
        plan, chosen, total = step.plan, None, None
        if plan.kind is StepKind.UNIFORM:
            total = plan.row_budget
        elif plan.kind is not StepKind.FIXED:
            chosen, total = self.planning.selector.select(step, full, keys)
        trees = self.gate.finalize(full, keys, draft_input.bonus_tokens, chosen)
        num_steps, (requests, width) = self.host.num_steps, trees.tokens.shape
        shape: Any = {"parents": trees.parents, "num_steps": num_steps}
        if total == requests * width or not self.packed:
            packing = Packing.full(requests, width, keys.device, **shape)
        else:
            packing = Packing(trees.num_nodes, width, total=total, **shape)
        return build_verify_input(
            trees, batch, num_steps=num_steps, topk=self.host.topk, packing=packing, step=step
        )

"""Draft trees of a batch: it measures and judges layers, and builds the trees to verify.

It wraps :class:`~sglang_c2t.draft.growth.TreeGrowth`: it measures draft logits for the policy,
leaves exploration steps uncut, and fits the batch into the rows of one target forward. With a
program (:mod:`sglang_c2t.kernels.gate`) one call per layer measures, finds the K best children and
computes confidences. On a GPU another kernel grows the tree.

Legend: B requests, W beam rows, K topk, N nodes of a tree, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.draft.gate import Gate
from sglang_c2t.draft.growth import PER_NODE, TreeGrowth, node_margins
from sglang_c2t.draft.slots import FirstLayer
from sglang_c2t.kernels.beams import Beams, Rule
from sglang_c2t.kernels.gate import judge_layer
from sglang_c2t.kernels.gate_program import FusedGate, GateOutput
from sglang_c2t.kernels.rows import runs_triton
from sglang_c2t.kernels.trees import cut_and_link
from sglang_c2t.policies.base import TreeLayer, TreePolicy, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.fused import growth_rule
from sglang_c2t.tree import LinkedTrees, Trees, within_budget


class TreeGate(Gate):
    """Grows the trees of a batch with the policy.

    Args:
        policy: Decides which nodes enter a tree and which are expanded.
        shape: Limits of the trees.
        max_rows: Nodes of the whole batch that one target forward may verify, roots included; each
            request keeps its root. ``None``: no limit.
        parts: See :class:`~sglang_c2t.draft.gate.Gate`.

    Raises:
        ConfigError: The policy's trees do not fit into ``shape``.
    """

    def __init__(
        self,
        policy: TreePolicy,
        shape: TreeShape,
        *,
        max_rows: int | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(policy, topk=shape.topk, **parts)
        policy.check(shape)
        self._shape = shape
        self._max_rows = max_rows
        self._growth: TreeGrowth
        # Of the next layer: [B * W, ...], or the program's output for its children.
        self._rows: dict[str, Tensor] = {}
        self._judged: GateOutput | None = None

    def switch(self, policy: TreePolicy, *, captured: bool) -> None:
        """Replace the policy; see :meth:`ServedPolicy.switch`. Captured graphs also fix the growth
        rule.
        """
        policy.check(self._shape)
        if captured and _rule(policy) != _rule(self.served.policy):
            raise ConfigError(
                f"policy {policy.name} grows trees by another rule than the one that CUDA graphs "
                "were captured with: start the server with it"
            )
        super().switch(policy, captured=captured)

    def begin(self, slots: Tensor) -> None:
        """Start a step for the requests in ``slots`` [B]."""
        self._start()
        self._rows, self._judged = {}, None
        self._first: FirstLayer | None = None
        if self.program is None:
            self._rows = self._measured_first(slots)
        else:
            self._first = self.first_tokens.judged(slots)
        self._growth = TreeGrowth(
            # An exploration step records all nodes that a policy could choose.
            EAGLE2() if self.exploring else self.served.policy,
            self._shape,
            len(slots),
            slots.device,
            failed=self._fall_back,
            whole=None if self.planned else self.opt_outs.whole(slots),
            fused=self._fused(slots),
        )

    def warm_up(self) -> None:
        """Also compile trees of one layer, which a planner may choose and no graph drafts."""
        super().warm_up()
        if self.planned:
            dummy_slot = torch.zeros(1, dtype=torch.int64, device=self.first_tokens.device)
            self.begin(dummy_slot)
            children = torch.ones((1, 1, self.topk), device=dummy_slot.device)
            self.add(children.long(), children)
            self.finish()

    def _fused(self, slots: Tensor) -> tuple[Rule, Tensor] | None:
        """Return the rule for a kernel that grows this step's trees; ``None``: torch does."""
        rule = growth_rule(self.served.policy)
        if self.program is None or rule is None or not runs_triton(slots):
            return None
        return rule, self.program.beta

    def observe(
        self, logits: Tensor, hidden: Tensor | None = None, token_map: Tensor | None = None
    ) -> GateOutput | None:
        """Measure the rows of the next layer from draft ``logits`` [B * W, V]. A program also
        returns the rows' children, which :meth:`add` then uses. ``token_map`` [V] int64 maps draft
        ids to target ids; ``None``: they are equal.
        """
        self._logits = logits.shape[1], logits.dtype
        if self.program is None:
            self._rows = self.served.measured(logits, self._names - PER_NODE, hidden)
            return None
        beams = self._growth.beams
        self._judged = judge_layer(
            logits,
            self.program,
            depth=self._growth.depth + 1,
            topk=self.topk,
            joint=beams.joint.flatten(),
            alive=beams.alive.flatten(),
            token_map=token_map,
            width=beams.tokens.shape[1],
        )
        return self._judged

    def add(self, tokens: Tensor, prob: Tensor) -> Beams:
        """Judge a layer of ``tokens`` and ``prob`` [B, W, K]; returns the rows to forward next.
        After the first layer a program has already chosen the children and replaces the arguments.
        """
        if self._judged is not None:
            judged, shape = self._judged, (self.batch, -1, self.topk)
            tokens, prob = judged.tokens.view(shape), judged.prob.view(shape)
            if self._growth.fused:
                confidence = judged.confidence.view(self.batch, -1)
                return self._growth.add_judged(tokens, prob, confidence)
            measured = {
                "entropy": judged.entropy,
                "confidence": judged.confidence.flatten(),
                "keep": judged.keep.flatten(),
            }
            return self._growth.add(tokens, prob, measured)
        if self.program is not None:
            assert self._first is not None, "no step began"
            if self._growth.fused:
                return self._growth.add_judged(tokens, prob, self._first.confidence.T)
            return self._growth.add(tokens, prob, self._judged_first(self._first, self.program))
        measured = {name: v for name, v in self._rows.items() if name not in {"prob", *PER_NODE}}
        if "margin" in self._names:
            measured["margin"] = node_margins(prob.flatten(0, 1))
        return self._growth.add(tokens, prob, measured)

    def _judged_first(self, first: FirstLayer, program: FusedGate) -> dict[str, Tensor]:
        """Return the program's output for the first layer, from the end of the previous step."""
        confidence = first.confidence.T.flatten()  # [B * K]
        return {
            "entropy": first.entropy,
            "confidence": confidence,
            "keep": confidence >= program.beta,  # beta may have changed since
        }

    @property
    def topk(self) -> int:
        """K."""
        return self._shape.topk

    @property
    def num_nodes(self) -> int:
        """N."""
        return self._shape.num_draft_tokens

    @property
    def batch(self) -> int:
        """B of the current step."""
        return self._growth.batch

    @property
    def layers(self) -> list[TreeLayer]:
        """The layers judged in this step, shallowest first; none if a kernel grew them."""
        return self._growth.layers

    def any_alive(self) -> bool:
        """Whether any tree may still grow. Copies to the host: eager mode only. All ranks get the
        same answer, because it decides whether they run a forward.
        """
        return bool(self.agreed(self._growth.beams.alive.long()).any())

    def finish(self) -> tuple[Trees, Tensor]:
        """Return each request's tree without its root, and the keys [B, N] of its nodes. Static
        shapes and no host read, so a CUDA graph may contain it.
        """
        return self._growth.finish()

    def finalize(
        self, trees: Trees, keys: Tensor, roots: Tensor, chosen: Tensor | None = None
    ) -> LinkedTrees:
        """Return the trees to verify, equal on all ranks, with ``roots`` [B], the committed bonus
        tokens. They hold the ``chosen`` [B, N - 1] nodes of a planner, otherwise those within the
        row budget.
        """
        if chosen is None and self._max_rows is not None and not self.exploring:
            chosen = within_budget(trees, keys, self._max_rows)
        linked = cut_and_link(trees, roots, chosen)
        return linked if self._agree is None else linked.agreed(self._agree)


def _rule(policy: TreePolicy) -> tuple[type, Rule | None]:
    """Return what a captured graph fixes of a policy, beyond the gate's data."""
    return type(policy), growth_rule(policy)

"""The trees of a server's batch: what was relayed, what the draft says, what is verified.

Around :class:`~sglang_c2t.draft.growth.TreeGrowth`: measures draft logits for the policy, leaves
exploring steps whole, and fits the batch into the rows of one target forward. With a
program (:mod:`sglang_c2t.kernels.gate`) one kernel call per layer measures, finds the K
best children and computes the gate's confidence.

Knows nothing of SGLang.

Legend: B requests, W beam rows, K topk, N nodes of a tree, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.draft.growth import PER_NODE, Beams, TreeGrowth, node_margins
from sglang_c2t.draft.relay import FirstTokenRelay
from sglang_c2t.draft_layer import measure
from sglang_c2t.kernels.gate import GateProgram, Judged, judge_layer
from sglang_c2t.policies.base import Gate, Growth, TreeLayer, TreePolicy, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree
from sglang_c2t.tree import Trees, within_budget


class TreeGate(FirstTokenRelay):
    """Grows the trees of a batch with the policy.

    Args:
        policy: What enters a tree and what is expanded.
        shape: How large trees may become.
        max_rows: Nodes of the whole batch that one target forward may verify, roots
            included (each request keeps its root); ``None``: no limit.
        relay: See :class:`~sglang_c2t.draft.relay.FirstTokenRelay`.

    Raises:
        ConfigError: The policy's trees do not fit into ``shape``.
    """

    def __init__(
        self,
        policy: TreePolicy,
        shape: TreeShape,
        *,
        max_rows: int | None = None,
        **relay: Any,
    ) -> None:
        super().__init__(policy, topk=shape.topk, **relay)
        policy.check(shape)
        self._policy = self._with_live_beta(policy)
        self._shape = shape
        self._max_rows = max_rows
        self._growth: TreeGrowth
        # Of the layer to come: [B * W, ...], or all that a program says about its children.
        self._rows: dict[str, Tensor] = {}
        self._judged: Judged | None = None

    def switch(self, policy: TreePolicy, *, captured: bool) -> None:
        """Ask another policy; see :meth:`FirstTokenRelay.switch`.

        In captured graphs trees must also grow by the same rule.
        """
        policy.check(self._shape)
        if captured and _rule(policy) != _rule(self._policy):
            raise ConfigError(
                f"policy {policy.name} grows trees by another rule than the one that CUDA graphs "
                "were captured with: start the server with it"
            )
        super().switch(policy, captured=captured)
        self._policy = self._with_live_beta(policy)

    def _with_live_beta(self, policy: TreePolicy) -> TreePolicy:
        """The policy, its threshold read from the program's memory: a captured graph would
        keep a number for ever.
        """
        if self._program is None or not isinstance(policy, (GatedTree, GatedEAGLE2)):
            return policy
        live: Any = _LiveBeta(policy.gate, self._program)
        return replace(policy, gate=live)

    def begin(self, slots: Tensor) -> None:
        """Start a step for the requests in ``slots`` [B]."""
        self._rows, self._judged = self._begin(slots), None
        # An exploring step records what any policy could have chosen.
        policy: Any = EAGLE2() if self.exploring else self._policy
        whole = self._whole_of(slots)
        if whole is not None:
            policy = _WholeFor(whole, policy)
        failed = partial(self._fall_back, self._policy)
        self._growth = TreeGrowth(policy, self._shape, len(slots), slots.device, failed)

    def observe(
        self, logits: Tensor, hidden: Tensor | None = None, token_map: Tensor | None = None
    ) -> Judged | None:
        """Measure the rows of the layer to come: draft ``logits`` [B * K, V].

        With a program also their children, which it returns: :meth:`add` takes no others.
        ``token_map`` [V] int64 are the target ids of the draft's; ``None``: the same.
        """
        if self.program is None:
            self._rows = measure(logits, self._names - PER_NODE, hidden=hidden)
            return None
        beams = self._growth.beams
        self._judged = judge_layer(
            logits,
            self.program,
            depth=len(self.layers) + 1,
            topk=self._shape.topk,
            joint=beams.joint.flatten(),
            alive=beams.alive.flatten(),
            token_map=token_map,
        )
        return self._judged

    def add(self, tokens: Tensor, prob: Tensor) -> Beams:
        """Judge a layer, [B, W, K] each; returns the rows to forward next.

        Behind the first layer a program has chosen the children itself.
        """
        if self._judged is not None:
            judged, shape = self._judged, tokens.shape
            measured = {
                "entropy": judged.entropy,
                "margin": judged.margin.flatten(),
                "confidence": judged.confidence.flatten(),
            }
            return self._growth.add(judged.tokens.view(shape), judged.prob.view(shape), measured)
        measured = {name: v for name, v in self._rows.items() if name not in {"prob", *PER_NODE}}
        if "margin" in self._names:
            measured["margin"] = node_margins(prob.flatten(0, 1))
        return self._growth.add(tokens, prob, measured)

    @property
    def batch(self) -> int:
        """B of the step in progress."""
        return self._growth.batch

    @property
    def ancestor_rows(self) -> Tensor:
        """[B, K, d] int64: where the beams' ancestors were forwarded (d layers so far)."""
        return self._growth.ancestor_rows

    @property
    def layers(self) -> list[TreeLayer]:
        """The layers judged in this step, shallowest first."""
        return self._growth.layers

    def any_alive(self) -> bool:
        """Whether any tree may still grow. Reads the host: eager mode only.

        The same on all ranks, because it decides whether they forward.
        """
        return bool(self._agree(self._growth.beams.alive.long()).any())

    def finish(self) -> tuple[Trees, Tensor]:
        """Each request's tree by itself, roots not filled in, and its nodes' keys [B, N].

        Static shapes, no host read: may stand inside a CUDA graph.
        """
        return self._growth.finish(
            torch.zeros(self._growth.batch, dtype=torch.int64, device=self._growth.device)
        )

    def settle(self, trees: Trees, keys: Tensor, roots: Tensor) -> Trees:
        """What the target verifies: within the batch's budget, equal on all ranks.

        ``roots`` [B] are the committed bonus tokens.
        """
        trees = trees.rooted(roots)
        if self._max_rows is not None and not self.exploring:
            trees = within_budget(trees, keys, self._max_rows)
        return trees.agreed(self._agree)


def _rule(policy: TreePolicy) -> tuple[type, int | None]:
    """What of a policy a captured graph holds beyond the gate's data."""
    return type(policy), getattr(policy, "layer_limit", None)


class _LiveBeta:
    """A gate whose threshold is data in device memory."""

    def __init__(self, gate: Gate, program: GateProgram) -> None:
        self._gate = gate
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    @property
    def beta(self) -> Tensor:
        return self._program.beta


class _WholeFor:
    """EAGLE-2's trees for requests that opted out, ``whole`` [B], the policy's for the others."""

    def __init__(self, whole: Tensor, policy: TreePolicy) -> None:
        self._whole = whole
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def grow(self, layer: TreeLayer) -> Growth:
        own, all_of_it = self._policy.grow(layer), EAGLE2().grow(layer)
        whole = self._whole[:, None, None]
        return Growth(
            key=torch.where(whole, all_of_it.key, own.key),
            expand=torch.where(whole, all_of_it.expand, own.expand),
            verify=None if own.verify is None else own.verify | whole,
        )

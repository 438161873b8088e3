"""C2T on trees: prune while the tree grows (Algorithm 1), or after EAGLE-2 chose its nodes.

Algorithm 1 (arXiv:2502.13652): of each layer's children, those with confidence >= beta
enter the tree and are expanded further. The draft forwards at most K nodes per layer, the
most confident ones ("second pruning", section 4.2.2); ``layer_limit`` lets no more than so
many of a layer into the tree either, as the paper's topK rows do. Where the cap N bites,
the least confident go.

``GatedEAGLE2`` grows and reranks by joint probability like EAGLE-2 and prunes the result:
the classifier as a filter behind the tree that users already have.

``PlannedTree`` prunes nothing: which nodes are verified is planned over the whole batch.

Any gate with a confidence will do: the trained ones, ``dyjoint`` (the joint probability
itself as the confidence) or ``dymax``.

Sampled drafts: keep-then-stop or safe to drop as the gate itself says. A plan goes by drafts, by
what was committed and by the load: never by the noise that acceptance draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_c2t.checks import is_whole, require
from sglang_c2t.plan.trees import TreePlanner
from sglang_c2t.policies.base import Gate, Growth, TreeLayer, TreeShape


@dataclass(frozen=True)
class _Gated:
    """What both kinds of pruning take over from their gate."""

    gate: Gate

    @property
    def name(self) -> str:
        """The gate's."""
        return self.gate.name

    @property
    def needs(self) -> frozenset[str]:
        """What the gate reads."""
        return self.gate.needs

    def check(self, shape: TreeShape) -> None:
        """Any shape will do."""

    def confidence(self, layer: TreeLayer) -> Tensor:
        """[B, W, K] float32: the gate's, asked only where no kernel has computed it."""
        known = layer.nodes.measured.get("confidence")
        values = self.gate.confidence(layer.nodes) if known is None else known
        return layer.grid(values).float()

    def passes(self, layer: TreeLayer) -> Tensor:
        """[B, W, K] bool: the gate believes in the node; a kernel knows its own threshold."""
        known = layer.nodes.measured.get("keep")
        return self.confidence(layer) >= self.gate.beta if known is None else layer.grid(known)


@dataclass(frozen=True)
class GatedTree(_Gated):
    """A gate prunes each layer before the next is drafted."""

    layer_limit: int | None = None

    def __post_init__(self) -> None:
        """Reject a limit that is no count."""
        require(
            self.layer_limit is None or is_whole(self.layer_limit, 1),
            f"policy {self.name}: layer_limit",
            "a whole number >= 1",
            self.layer_limit,
        )

    def grow(self, layer: TreeLayer) -> Growth:
        """The confident ones enter and go on."""
        passed = self.passes(layer) & layer.grid(layer.nodes.alive)
        key = self.confidence(layer).masked_fill(~passed, -torch.inf)
        if self.layer_limit is not None:
            key = key.masked_fill(_rank(key) >= self.layer_limit, -torch.inf)
        return Growth(key=key, expand=key)


@dataclass(frozen=True)
class GatedEAGLE2(_Gated):
    """EAGLE-2's tree, less the nodes the gate does not believe in."""

    @property
    def name(self) -> str:
        """The gate's, and what it prunes."""
        return f"{self.gate.name}-eagle2"

    def grow(self, layer: TreeLayer) -> Growth:
        """Rank by joint probability; the gate has the second word."""
        return Growth(key=layer.joint, expand=layer.joint, verify=self.passes(layer))


@dataclass(frozen=True)
class PlannedTree(_Gated):
    """The most confident nodes, as many as a tree may have; a planner chooses among them."""

    def grow(self, layer: TreeLayer) -> Growth:
        """All enter, so that the host knows how many there are; the confident ones go on."""
        key = self.confidence(layer).nan_to_num(0.0)
        return Growth(key=key, expand=key)

    def planner(self, shape: TreeShape) -> TreePlanner:
        """A planner that knows nothing yet, of trees of this shape."""
        return TreePlanner(*shape)


def _rank(key: Tensor) -> Tensor:
    """[B, W, K] int64: place among the nodes of the request's layer, 0 for the best."""
    flat = key.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    place = torch.arange(flat.shape[1], device=key.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, place).view_as(key)

"""C2T on trees: prune while the tree grows (Algorithm 1), or after EAGLE-2 chose its nodes.

Algorithm 1 (arXiv:2502.13652): children with confidence >= beta enter the tree and are expanded.
The draft forwards the K most confident nodes per layer ("second pruning", section 4.2.2).
``layer_limit`` also limits the nodes of a layer in the tree, as the paper's topK rows do. Beyond
the cap N the least confident nodes go.

``GatedEAGLE2`` grows and reranks by joint probability as EAGLE-2 does, then the gate filters the
result. ``PlannedTree`` prunes nothing: the planner selects nodes over the whole batch.

Any gate with a confidence works: the trained ones, ``dyjoint`` (the joint probability) or
``dymax``.

Sampled drafts: keep-then-stop or safe to drop, as the gate is. A plan depends on drafts, committed
tokens and the load, never on the noise that acceptance draws.
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
    """Members of the gate that all policies here use."""

    gate: Gate

    @property
    def name(self) -> str:
        """The gate's name."""
        return self.gate.name

    @property
    def needs(self) -> frozenset[str]:
        """The gate's needs."""
        return self.gate.needs

    def check(self, shape: TreeShape) -> None:
        """Accept any shape."""

    def confidence(self, layer: TreeLayer) -> Tensor:
        """[B, W, K] float32: the gate's confidence, computed here if no kernel did."""
        known = layer.nodes.measured.get("confidence")
        values = self.gate.confidence(layer.nodes) if known is None else known
        return layer.grid(values).float()

    def passes(self, layer: TreeLayer) -> Tensor:
        """[B, W, K] bool: the confidence reaches beta; a kernel uses its own threshold."""
        known = layer.nodes.measured.get("keep")
        return self.confidence(layer) >= self.gate.beta if known is None else layer.grid(known)


@dataclass(frozen=True)
class GatedTree(_Gated):
    """A gate prunes each layer before the next is drafted."""

    layer_limit: int | None = None

    def __post_init__(self) -> None:
        """Reject limits that are not positive whole numbers."""
        require(
            self.layer_limit is None or is_whole(self.layer_limit, 1),
            f"policy {self.name}: layer_limit",
            "a whole number >= 1",
            self.layer_limit,
        )

    def grow(self, layer: TreeLayer) -> Growth:
        """Add and expand the nodes that pass the gate."""
        passed = self.passes(layer) & layer.grid(layer.nodes.alive)
        key = self.confidence(layer).masked_fill(~passed, -torch.inf)
        if self.layer_limit is not None:
            key = key.masked_fill(_rank(key) >= self.layer_limit, -torch.inf)
        return Growth(key=key, expand=key)


@dataclass(frozen=True)
class GatedEAGLE2(_Gated):
    """EAGLE-2's tree without the nodes that fail the gate."""

    @property
    def name(self) -> str:
        """The gate's name with the suffix ``-eagle2``."""
        return f"{self.gate.name}-eagle2"

    def grow(self, layer: TreeLayer) -> Growth:
        """Rank by joint probability; the gate filters afterwards."""
        return Growth(key=layer.joint, expand=layer.joint, verify=self.passes(layer))


@dataclass(frozen=True)
class PlannedTree(_Gated):
    """The most confident nodes, up to a tree's limit; a planner selects among them."""

    def grow(self, layer: TreeLayer) -> Growth:
        """Add all nodes, so that the host knows their number; expand the confident ones."""
        key = self.confidence(layer).nan_to_num(0.0)
        return Growth(key=key, expand=key)

    def planner(self, shape: TreeShape) -> TreePlanner:
        """Return a new planner for trees of this shape."""
        return TreePlanner(*shape)


def _rank(key: Tensor) -> Tensor:
    """[B, W, K] int64: place among the nodes of the request's layer, 0 for the best."""
    flat = key.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    place = torch.arange(flat.shape[1], device=key.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, place).view_as(key)

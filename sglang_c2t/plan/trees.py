"""The planner of draft trees: what :mod:`~sglang_c2t.plan.planner` does for chains.

A node is as sure as the least sure one on its path, and survives no more often than its parent:
its survival falls along every path, so that the best nodes of a batch are trees. For plans, and for
the forecast of layers that are not drafted yet, a tree is what its layers hold: the confidences of
each, the best first. Which of them hang together matters only once nodes are chosen, and then the
device knows.

A draft layer forwards W rows of every request, the width of the tree, and each offers K children
for nothing. K rows pay while they are cheap. Under load one is forwarded: the tree is then a chain
with the siblings of its drafts, and what the other rows would have cost goes into the survivors of
more requests. The first layer, which comes with draft extend, is the same either way. How drafts of
a width go on is learnt from steps of that width.

numpy only; knows neither torch nor SGLang.

Legend: B requests, S samples of them, D layers, d of them drafted, W width, K topk, C confidences
of a layer at most, N nodes of a tree, its root included.
"""

from __future__ import annotations

import numpy as np

from sglang_c2t.plan.acceptance import Acceptance
from sglang_c2t.plan.forecast import Continuations
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.survival import Array, Numbers, Survival


class TreePlanner(Planner):
    """The planner of a server that verifies trees.

    Args:
        topk: K, and the largest W.
        max_depth: D.
        max_nodes: N.
    """

    survival: Survival

    samples = 64  # each is many drafts

    def __init__(self, topk: int, max_depth: int, max_nodes: int) -> None:
        self.widths, self._max_nodes = (1, topk), max_nodes
        super().__init__(max_depth, Survival(max_depth))

    def layer_nodes(self, width: int) -> int:
        """C of trees of this ``width``."""
        return min(width * self.widest, self._max_nodes - 1)

    def full_rows(self, layers: int, width: int = 1) -> int:
        """Nodes of a tree of d ``layers``: the K children of the root, and of W rows behind each
        but the last, N at most.
        """
        return min(1 + self.widest * (1 + (layers - 1) * width), self._max_nodes)

    def learn_nodes(
        self, width: int, layers: int, *outcome: Numbers, constrained: bool = False
    ) -> None:
        """Learn from a step, now or together with others.

        Args:
            width: W of its trees.
            layers: d of them.
            outcome: Of their drafts [B, N - 1] the depths, 0 for padding, the least confidences on
                their paths, which were verified and which accepted.
            constrained: Whether all of these requests are.
        """
        self._learn_soon(width, layers, outcome, constrained=constrained)

    def by_layer(self, depth: Numbers, confidence: Array, width: int, layers: int) -> Array:
        """[B, d, C]: see :func:`by_layer`."""
        return by_layer(depth, confidence, layers, self.layer_nodes(width))

    def _survivals_by(self, survival: Survival, confidences: Array) -> Array:
        """[S, d, C]: survival in trees with ``confidences`` [S, d, C] by layer, 0 where is no node.

        No node is taken to survive more often than the best of the layer before.
        """
        depths = 1 + np.arange(confidences.shape[1])[:, None]
        each = np.where(confidences > 0, survival(depths, confidences), 0.0)
        best = np.minimum.accumulate(each.max(axis=2), axis=1)
        return np.minimum(each, best[:, :, None])

    def _behind(
        self, first: Array, most: int, width: int, constrained: Numbers | None = None
    ) -> Array:
        """``first`` [S, C] of the widest."""
        return super()._behind(first[:, : self.layer_nodes(width)], most, width, constrained)

    def _alike_of(self, survival: Array, width: int) -> Array:
        """Plain drafts of one row a layer are chains: of each layer the best node."""
        return survival if width > 1 else survival[:, :, :1]

    def _learn(self, of: Acceptance, width: int, layers: int, *outcome: Numbers) -> None:
        depth, confidence, verified, survived = outcome
        of.drafted(width, self.by_layer(depth, confidence, width, layers))
        depth, confidence, survived = depth[verified], confidence[verified], survived[verified]
        of.grade(depth, confidence, of.survival(depth, confidence), survived)
        of.survival.observe(depth, confidence, survived)

    def _nothing_seen(self, width: int) -> Continuations:
        return Continuations(self.max_depth, width=self.layer_nodes(width))


def by_layer(depth: Numbers, confidence: Array, layers: int, most: int) -> Array:
    """[B, d, C], C ``most``: the ``confidence`` [B, n] of nodes at ``depth`` [B, n], of each layer
    the best first, and 0 where there are no more.
    """
    depths = 1 + np.arange(layers)[:, None]
    found = np.where(depth[:, None] == depths, confidence[:, None], 0.0)  # [B, d, n]
    best = np.zeros((len(depth), layers, most))
    held = min(most, depth.shape[1])
    best[:, :, :held] = -np.sort(-found, axis=2)[:, :, :held]
    return best

"""The planner of draft trees: what :mod:`~sglang_c2t.plan.planner` does for chains.

A node is as sure as the least sure one on its path, and survives no more often than its parent:
its survival falls along every path, so that the best nodes of a batch are trees. For plans, and for
the forecast of layers that are not drafted yet, a tree is what its layers hold: the confidences of
each, the best first. Which of them hang together matters only once nodes are chosen, and then the
device knows.

numpy only; knows neither torch nor SGLang.

Legend: B requests, S samples of them, D layers, d of them drafted, K topk, C confidences of a layer
at most, N nodes of a tree, its root included.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from sglang_c2t.plan.acceptance import Acceptance
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.survival import Array, Numbers, Survival


class TreePlanner(Planner):
    """The planner of a server that verifies trees.

    Args:
        topk: K.
        max_depth: D.
        max_nodes: N.
    """

    survival: Survival

    samples = 64  # each is many drafts

    def __init__(self, topk: int, max_depth: int, max_nodes: int) -> None:
        self.topk, self._max_nodes = topk, max_nodes
        self.layer_nodes = min(topk * topk, max_nodes - 1)
        """C."""
        super().__init__(max_depth, Survival(max_depth))

    def full_rows(self, layers: int) -> int:
        """Nodes of a tree of d ``layers``: the K children of the root, and of K rows of each layer
        but the last, N at most.
        """
        return min(1 + self.topk * (1 + (layers - 1) * self.topk), self._max_nodes)

    def _survivals_by(self, survival: Survival, confidences: Array) -> Array:
        """[S, d, C]: survival in trees with ``confidences`` [S, d, C] by layer, 0 where is no node.

        No node is taken to survive more often than the best of the layer before.
        """
        depths = 1 + np.arange(confidences.shape[1])[:, None]
        each = np.where(confidences > 0, survival(depths, confidences), 0.0)
        best = np.minimum.accumulate(each.max(axis=2), axis=1)
        return np.minimum(each, best[:, :, None])

    def _learn_outcomes(self, of: Acceptance, layers: int, *outcome: Numbers) -> None:
        depth, confidence, verified, survived = outcome
        of.drafted(by_layer(depth, confidence, layers, self.layer_nodes))
        depth, confidence, survived = depth[verified], confidence[verified], survived[verified]
        of.grade(depth, confidence, of.survival(depth, confidence), survived)
        of.survival.observe(depth, confidence, survived)

    def _first_layers(self, outcome: tuple[Numbers, ...]) -> Array:
        depth, confidence, *_ = outcome
        return by_layer(depth, confidence, 1, self.layer_nodes)[:, 0]

    def _acceptance(self, survival: Survival) -> Acceptance:  # type: ignore[override]
        survivals = partial(self._survivals_by, survival)
        return Acceptance(survival, self.max_depth, survivals, self.layer_nodes)


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

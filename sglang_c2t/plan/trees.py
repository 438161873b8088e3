"""The planner of draft trees: what :mod:`~sglang_c2t.plan.planner` does for chains.

A node is as sure as the least sure one on its path, and survives no more often than its parent:
its survival falls along every path, so that the best nodes of a batch are trees. For plans, and for
the forecast of layers that are not drafted yet, a tree is what its layers hold: the confidences of
each, the best first. Which of them hang together matters only once nodes are chosen, and then the
device knows.

numpy only; knows neither torch nor SGLang.

Legend: B requests, S samples of them, D layers, d of them drafted, K topk, W confidences of a layer
at most, N nodes of a tree, its root included.
"""

from __future__ import annotations

import numpy as np

from sglang_c2t.plan.forecast import Continuations
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
        self._topk, self._max_nodes = topk, max_nodes
        super().__init__(max_depth, Survival(max_depth))

    @property
    def width(self) -> int:
        """W."""
        return min(self._topk**2, self._max_nodes - 1)

    def full_rows(self, layers: int) -> int:
        """Nodes of a tree of d ``layers``: of each K rows the K best children, N at most."""
        return min(1 + self._topk + (layers - 1) * self._topk**2, self._max_nodes)

    def survivals(self, confidences: Array) -> Array:
        """[S, d, W]: survival in trees with ``confidences`` [S, d, W] by layer, 0 where is no node.

        No node is taken to survive more often than the best of the layer before.
        """
        depths = 1 + np.arange(confidences.shape[1])[:, None]
        survival = np.where(confidences > 0, self.survival(depths, confidences), 0.0)
        best = np.minimum.accumulate(survival.max(axis=2), axis=1)
        return np.minimum(survival, best[:, :, None])

    def learn_nodes(self, layers: int, *outcome: Numbers) -> None:
        """Learn from a step, now or together with others.

        Args:
            layers: d of its trees.
            outcome: Of their drafts [B, N - 1] the depths, 0 for padding, the least confidences on
                their paths, which were verified and which accepted.
        """
        self._learn_soon(layers, outcome)

    def _learn(self, layers: int, *outcome: Numbers) -> None:
        depth, confidence, verified, survived = outcome
        self._continuations.observe(by_layer(depth, confidence, layers, self.width))
        depth, confidence, survived = depth[verified], confidence[verified], survived[verified]
        self._grade(depth, self.survival(depth, confidence), survived)
        self.survival.observe(depth, confidence, survived)

    def _nothing_seen(self) -> Continuations:
        return Continuations(self.max_depth, width=self.width)


def by_layer(depth: Numbers, confidence: Array, layers: int, width: int) -> Array:
    """[B, d, W]: the ``confidence`` [B, n] of nodes at ``depth`` [B, n], of each layer the best
    first, and 0 where there are no more.
    """
    depths = 1 + np.arange(layers)[:, None]
    found = np.where(depth[:, None] == depths, confidence[:, None], 0.0)  # [B, d, n]
    found = -np.sort(-found, axis=2)[:, :, :width]
    return np.pad(found, ((0, 0), (0, 0), (0, width - found.shape[2])))

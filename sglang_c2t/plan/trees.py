"""The planner of draft trees, as :mod:`~sglang_c2t.plan.planner` is for chains.

A node's confidence is the least one on its path, and its survival is at most its parent's.
Survival falls along every path, so the best nodes of a batch form trees. For plans and forecasts
a tree is a list of layers, each with its confidences, the best first. Only the selection of nodes
needs the parents, and it runs on the device.

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
    """The planner of a server that verifies trees."""

    survival: Survival

    samples = 64  # each holds many drafts

    def __init__(self, topk: int, max_depth: int, max_nodes: int) -> None:
        self.topk, self._max_nodes = topk, max_nodes
        self.layer_nodes = min(topk * topk, max_nodes - 1)
        """C."""
        super().__init__(max_depth, Survival(max_depth))

    def full_rows(self, layers: int) -> int:
        """Return the nodes of a tree of d ``layers``, N at most. These are the root, its K
        children, and K children of each of K nodes per further layer.
        """
        if layers == 0:
            return 1
        return min(1 + self.topk * (1 + (layers - 1) * self.topk), self._max_nodes)

    def _survivals_by(self, survival: Survival, confidences: Array) -> Array:
        """Return [S, d, C]: survival in trees with ``confidences`` [S, d, C] by layer, 0 without a
        node. A node's survival is at most the best of the layer before.
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
    """Return [B, d, C] with C = ``most``: confidences by layer, the best first, padded with 0. The
    nodes have ``confidence`` [B, n] and ``depth`` [B, n].
    """
    depths = 1 + np.arange(layers)[:, None]
    found = np.where(depth[:, None] == depths, confidence[:, None], 0.0)  # [B, d, n]
    best = np.zeros((len(depth), layers, most))
    held = min(most, depth.shape[1])
    best[:, :, :held] = -np.sort(-found, axis=2)[:, :, :held]
    return best

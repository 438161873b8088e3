"""The planner beside a server's steps, where drafts are trees.

Trees are grown without a threshold, so that the host knows how many nodes there are, and the best
of the batch are verified: on the device, after its draft, outside of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_c2t.draft.slots import FirstLayer
from sglang_c2t.kernels.budget import nodes_within
from sglang_c2t.kernels.outcome import outcome_of_trees
from sglang_c2t.plan.survival import Array, Numbers, as_probabilities
from sglang_c2t.plan.trees import TreePlanner
from sglang_c2t.srt.draft.outcomes import Outcome
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.verify.packed import PackedVerifyInput
from sglang_c2t.srt.verify.tree import TreeVerifyInput
from sglang_c2t.tree import Trees

# B requests, D layers, d of them drafted, N nodes of a tree, S = D + 1 nodes of the longest path


class TreePlanning(Planning):
    """Plans the steps of one server that verifies trees; arguments as of :class:`Planning`."""

    planner: TreePlanner

    _drafted: tuple[Tensor, Tensor, Tensor]
    """Of the step in progress: depths [B, N], least confidences on paths [B, N], and which drafts
    [B, N - 1] are verified."""

    def __init__(self, planner: TreePlanner, **options: Any) -> None:
        super().__init__(planner, **options)
        self._known_first = np.full((1, planner.layer_nodes(planner.widest)), 0.5)

    def warm_up(self, batches: Iterable[int]) -> None:
        """Compile what is launched outside of graphs, for batches of these sizes."""
        device = self._survivals.device
        for batch in batches:
            links = torch.zeros((batch, self._width, 3), dtype=torch.int64, device=device)
            parents, depth, _ = links.unbind(dim=2)  # in one table, as drafted
            trees = Trees(parents, parents, depth, parents[:, 0], parents)
            survival = self._survival.of_nodes(
                torch.zeros_like(parents, dtype=torch.float32), trees
            )
            for whole in (None, parents[:, 0] > 0):
                chosen = nodes_within(survival, depth, 0, whole)
            path = torch.zeros((batch, self._width), dtype=torch.int32, device=device)
            outcome_of_trees(depth, survival, chosen, path, path[:, 0].contiguous())

    def choose_nodes(
        self, trees: Trees, keys: Tensor, layers: int, whole: Collection[int] = ()
    ) -> tuple[Tensor, int]:
        """[B, N - 1] bool, the nodes behind roots that are verified, and how many with the roots.

        Args:
            trees: As drafted.
            keys: [B, N] least confidence on each node's path.
            layers: d, drafted.
            whole: Which of the B requests' trees are verified whole, come what may.
        """
        depth, width = trees.depth[:, 1:], self.width

        def seen() -> Array:
            confidence, _ = as_probabilities(of_nodes(depth.numpy(), keys[:, 1:].numpy()))
            return self.planner.by_layer(depth.numpy(), confidence, width, layers)

        drafts, mask, total = self._share(layers, whole, seen)
        survivals = self._survival.of_nodes(keys, trees)
        if self._constrained:
            theirs = self._of_constrained.of_nodes(keys, trees)
            constrained = self._mask(len(keys), self._constrained)
            survivals = torch.where(constrained[:, None], theirs, survivals)
        chosen = nodes_within(survivals, trees.depth, drafts, mask)
        self._drafted = trees.depth, keys, chosen
        return chosen, total

    def verified(self, verify_input: PackedVerifyInput, accept_lens: Tensor) -> None:
        """The outcome of a step: what the ``verify_input`` of its trees was accepted of."""
        if self.plain:  # nobody has said how sure its drafts were
            return
        assert isinstance(verify_input, TreeVerifyInput)
        assert verify_input.paths is not None, "told before it was verified"
        accepted, starts = verify_input.paths.accept_index, verify_input.packing.layout.row_starts
        self._send(outcome_of_trees(*self._drafted, accepted, starts))

    def _first(self, layer: FirstLayer) -> Array:
        confidence, _ = as_probabilities(layer.confidence.T.numpy())
        planner = self.planner
        return planner.by_layer(np.ones(confidence.shape), confidence, planner.widest, 1)[:, 0]

    def _learn_outcome(self, numbers: Numbers, outcome: Outcome) -> list[bool]:
        depth, least, chosen, survived = np.moveaxis(numbers, 2, 0)
        depth, chosen = depth.astype(np.int64), chosen > 0
        least, sane = self._sane(of_nodes(depth, least))
        self._knows(self.planner.by_layer(depth, least, self.planner.widest, 1)[:, 0], outcome)
        plan, learnt = outcome.plan, []
        for rows, constrained in outcome.classes(sane):
            nodes = (depth[rows], least[rows], chosen[rows], survived[rows])
            self.planner.learn_nodes(plan.width, plan.layers, *nodes, constrained=constrained)
            learnt.append(constrained)
        return learnt


def of_nodes(depth: Numbers, least: Numbers) -> Numbers:
    """``least`` [B, n] confidences of the nodes at ``depth`` [B, n], 0 of padding."""
    return np.where(depth > 0, least, 0.0)

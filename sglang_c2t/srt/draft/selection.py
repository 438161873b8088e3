"""Distributes the row budget of a step to the best drafts of the batch, on the device.

It computes survivals on the device, with the planner's learnt values. Outcomes return in one table
per step. For chains the draft's CUDA graphs compute survivals. For trees this happens after these:
no threshold prunes a planned tree, so the host knows its number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_c2t.draft.survivals import DeviceSurvival
from sglang_c2t.kernels.budget import chains_within, nodes_within
from sglang_c2t.kernels.outcome import outcome_of_chains, outcome_of_trees
from sglang_c2t.plan.step import StepPlan
from sglang_c2t.plan.survival import Numbers
from sglang_c2t.srt.verify.packing import sent
from sglang_c2t.tree import Trees

# B requests, D layers, d of them drafted, N rows of a full draft or nodes of a tree


class _Survivals:
    """Survival estimates of both classes of requests, on the device."""

    def __init__(self, planner: Any, device: torch.device | str) -> None:
        self._planner, self._device = planner, torch.device(device)
        self._acceptances = planner.free, planner.constrained
        self._free, self._constrained = (
            DeviceSurvival(of.survival, device) for of in self._acceptances
        )

    def refresh(self, *, constrained: bool) -> None:
        """Copy the learnt values of one class of requests to the device."""
        twin = self._constrained if constrained else self._free
        twin.refresh(self._acceptances[constrained].survival)

    def _budget(self, step: Any) -> tuple[int, Tensor | None, int]:
        """Return the drafts to select, a mask of requests with full drafts, and the rows of all
        requests. The drafts are those of requests without a full draft. The mask is [B] bool, or
        ``None``.
        """
        plan, batch = step.plan, step.batch
        each = self._planner.full_rows(plan.num_layers) - 1
        full = {*step.full} if plan.full_draft_of is None else {*step.full, plan.full_draft_of}
        wanted = plan.row_budget - batch - len(full) * each
        drafts = min(max(wanted, 0), (batch - len(full)) * each)
        mask = self._mask(batch, full) if full else None
        return drafts, mask, batch + drafts + len(full) * each

    def _mask(self, batch: int, chosen: Collection[int]) -> Tensor:
        """[B] bool on the device, true at the ``chosen``; made on the host."""
        return sent(torch.from_numpy(mask_of(chosen, batch)), self._device)


class ChainSelector(_Survivals):
    """Selects drafts of chains.

    Args:
        planner: Its survival estimates are used.
        width: N.
        slots: Rows of SGLang's request table.
    """

    confidence_at = 0
    """Index of the table of confidences in an outcome."""

    def __init__(self, planner: Any, *, width: int, slots: int, device: torch.device | str) -> None:
        super().__init__(planner, device)
        self._width = width
        # Values of a step, in memory that CUDA graphs can write.
        self._confidences = torch.ones((slots, width - 1), device=device)
        self._survivals = torch.ones((slots, width - 1), device=device)

    def warm_up(self, batches: Iterable[int]) -> None:
        """Compile the kernels outside of graphs, for batches of these sizes."""
        for batch in batches:
            survivals = self._survivals[:batch]
            none = torch.zeros(batch, dtype=torch.bool, device=self._device)
            for full in (None, none):
                chains_within(survivals, 0, self._width, full)
            self._with_constrained(survivals, [0])
            ones = none.int() + 1
            outcome_of_chains(self._confidences[:batch], ones, ones)
            self.scored([survivals[:, 0].clone()])  # without a graph

    def scored(self, confidences: Sequence[Tensor]) -> None:
        """Store the confidences [B] of each drafted layer. A CUDA graph may capture it."""
        first, *more = confidences
        drafted = torch.stack((first, *more), dim=1) if more else first[:, None]
        here = slice(len(first)), slice(len(confidences))
        self._free.of_chains(drafted, out=self._survivals[here], kept=self._confidences[here])

    def select(
        self, step: Any, *, agreed: Callable[[Tensor], Tensor] = lambda mine: mine
    ) -> tuple[Tensor, Tensor, int]:
        """Return chains cut by :func:`chains_within`, and the rows of all requests. ``agreed``
        makes a tensor equal on all ranks.
        """
        drafts, mask, total = self._budget(step)
        survivals = self._survivals[: step.batch]
        if step.constrained:
            survivals = self._with_constrained(survivals, step.constrained)
        lens, links = chains_within(
            agreed(survivals), drafts, self._width, mask, layers=step.plan.num_layers
        )
        return lens, links, total

    def outcome(self, step: Any, verify_input: Any, accept_lens: Tensor) -> Tensor:
        """[B, d + 2], see :func:`outcome_of_chains`."""
        drafted = self._confidences[: step.batch, : step.plan.num_layers]
        return outcome_of_chains(drafted, verify_input.num_rows, accept_lens)

    def unpacked(self, numbers: Numbers, plan: StepPlan) -> Sequence[Numbers]:
        """Confidences [B, d], drafts verified [B] and accepted [B]."""
        layers = plan.num_layers
        return numbers[:, :layers], numbers[:, layers], numbers[:, layers + 1]

    def _with_constrained(self, survivals: Tensor, constrained: Collection[int]) -> Tensor:
        """``survivals`` [B, D], with the estimates of their class for ``constrained`` requests."""
        batch = len(survivals)
        confidences, theirs = self._confidences[:batch], torch.empty_like(survivals)
        self._constrained.of_chains(confidences, out=theirs, kept=confidences)
        return torch.where(self._mask(batch, constrained)[:, None], theirs, survivals)


class TreeSelector(_Survivals):
    """Selects nodes of trees; see :class:`ChainSelector`."""

    confidence_at = 1

    def __init__(self, planner: Any, *, width: int, device: torch.device | str) -> None:
        super().__init__(planner, device)
        self._width = width

    def warm_up(self, batches: Iterable[int]) -> None:
        """See :meth:`ChainSelector.warm_up`."""
        for batch in batches:
            links = torch.zeros((batch, self._width, 3), dtype=torch.int64, device=self._device)
            parents, depth, _ = links.unbind(dim=2)  # in one table, as drafted
            trees = Trees(parents, parents, depth, parents[:, 0], parents)
            survival = self._free.of_nodes(torch.zeros_like(parents, dtype=torch.float32), trees)
            for full in (None, parents[:, 0] > 0):
                chosen = nodes_within(survival, depth, 0, full)
            path = torch.zeros((batch, self._width), dtype=torch.int32, device=self._device)
            outcome_of_trees(depth, survival, chosen, path, path[:, 0].contiguous())

    def select(self, step: Any, trees: Trees, keys: Tensor) -> tuple[Tensor, int]:
        """Return the nodes to verify, [B, N - 1] bool without roots, and their number with roots.

        Args:
            step: With its plan.
            trees: As drafted.
            keys: [B, N] least confidence on each node's path.
        """
        drafts, mask, total = self._budget(step)
        survivals = self._free.of_nodes(keys, trees)
        if step.constrained:
            theirs = self._constrained.of_nodes(keys, trees)
            constrained = self._mask(len(keys), step.constrained)
            survivals = torch.where(constrained[:, None], theirs, survivals)
        chosen = nodes_within(survivals, trees.depth, drafts, mask)
        step.selected = trees.depth, keys, chosen
        return chosen, total

    def outcome(self, step: Any, verify_input: Any, _accept_lens: Tensor) -> Tensor:
        """[B, N - 1, 4], see :func:`outcome_of_trees`."""
        assert verify_input.paths is not None, "asked before it was verified"
        accepted, starts = verify_input.paths.accept_index, verify_input.packing.layout.row_starts
        depth, keys, chosen = step.selected
        return outcome_of_trees(depth, keys, chosen, accepted, starts)

    def unpacked(self, numbers: Numbers, _plan: StepPlan) -> Sequence[Numbers]:
        """Return depths (0: padding), confidences, verified and accepted, each [B, N - 1]."""
        depth, least, chosen, survived = np.moveaxis(numbers, 2, 0)
        return depth.astype(np.int64), np.where(depth > 0, least, 0.0), chosen > 0, survived


#: Distributes the row budgets of a planner.
Selector = ChainSelector | TreeSelector


def mask_of(chosen: Collection[int], batch: int) -> NDArray[np.bool_]:
    """[B] bool: true at the ``chosen``."""
    mask = np.zeros(batch, dtype=np.bool_)
    mask[list(chosen)] = True
    return mask

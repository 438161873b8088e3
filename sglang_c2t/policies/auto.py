"""Policies with a planner: it chooses layers and rows from calibrated survival and measured cost.

They have no threshold. Before each step the planner (:mod:`sglang_c2t.plan.planner`) chooses how
many layers to draft and how many rows to verify. The target verifies the batch's best drafts.
This is the objective of vLLM's adaptive verification (vllm-project/vllm PR 47808). The choice of
layers is ours.

Sampled drafts: keep-then-stop, as the gates whose confidences are ranked. Drafts are argmax here.
Which are verified depends on the drafts, the committed tokens and the load, never on the noise
that acceptance draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.survival import OneSlope, Survival
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dymax import DyMax


@dataclass(frozen=True)
class Auto(C2TPlus):
    """Planner over C2T-plus: chooses layers and rows, and calibrates confidences while serving. In
    trees :class:`~sglang_c2t.policies.gated_tree.PlannedTree` grows the planned drafts.
    """

    beta: ClassVar[float] = 0.0  # type: ignore[misc]  # no threshold: the plan decides
    name: ClassVar[str] = "auto"
    shipped_as: ClassVar[str] = C2TPlus.name

    def planner(self, shape: TreeShape) -> Planner:
        """Return a new planner for chains of this shape."""
        return Planner(shape.num_steps, Survival(shape.num_steps))


@dataclass(frozen=True)
class RowsOnly(DyMax):
    """Drafts all layers and plans rows with vLLM's estimator of acceptance. This is the rule of
    vLLM's adaptive verification (vllm-project/vllm PR 47808 and 52228) with costs measured here:
    the baseline of :class:`Auto`.
    """

    beta: ClassVar[float] = 0.0  # type: ignore[misc]
    name: ClassVar[str] = "rows-only"

    def planner(self, shape: TreeShape) -> Planner:
        """Return a new planner for chains of this shape."""
        return Planner(shape.num_steps, OneSlope(shape.num_steps), all_layers=True)


def plans(policy: object) -> bool:
    """Whether the policy, or policy class, has a planner."""
    return hasattr(policy, "planner")

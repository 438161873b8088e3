"""Policies that plan: what pays at this load, from calibrated survival and measured cost.

They cut nothing by a threshold. The server asks their planner (:mod:`sglang_c2t.plan.planner`)
before each step how many layers to draft and how many rows to verify, and the best drafts of the
batch are verified: the objective of vLLM's adaptive verification (vllm-project/vllm PR 47808) with
the number of layers as a second choice, which is ours.

Sampled drafts: keep-then-stop, as the gates whose confidences are ranked. Drafts are argmax here,
and what is verified depends on them, on what was committed and on the load: never on the noise
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
    """The planner over C2T-plus: layers and rows, with confidences calibrated while serving.

    In trees :class:`~sglang_c2t.policies.gated_tree.PlannedTree` grows what is planned.
    """

    beta: ClassVar[float] = 0.0  # type: ignore[misc]  # no threshold: all is kept for the plan
    name: ClassVar[str] = "auto"
    shipped_as: ClassVar[str] = C2TPlus.name

    def planner(self, shape: TreeShape) -> Planner:
        """A planner that knows nothing yet, of chains of this shape."""
        return Planner(shape.num_steps, Survival(shape.num_steps))


@dataclass(frozen=True)
class RowsOnly(DyMax):
    """All layers are drafted, and the rows planned with vLLM's estimator of acceptance.

    The rule of vLLM's adaptive verification (vllm-project/vllm PR 47808 and 52228) on costs that
    are measured here: the baseline of :class:`Auto`.
    """

    beta: ClassVar[float] = 0.0  # type: ignore[misc]
    name: ClassVar[str] = "rows-only"

    def planner(self, shape: TreeShape) -> Planner:
        """A planner that knows nothing yet, of chains of this shape."""
        return Planner(shape.num_steps, OneSlope(shape.num_steps), all_layers=True)


def plans(policy: object) -> bool:
    """Whether the policy, or the class of one, is one that plans."""
    return hasattr(policy, "planner")

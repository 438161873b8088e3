"""Messages between a planner and a server about one step.

The server asks its planner for a :class:`StepPlan` before it drafts. It returns a
:class:`StepRecord` once the outcome and the times of the step have arrived, a step or two later.

Legend: B requests, D layers, d of them drafted, n drafts of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from sglang_c2t.plan.survival import Numbers


class StepKind(Enum):
    """Reason for a step's plan; the value is its label in metrics, but see :data:`DRAFT_FREE`."""

    PLANNED = "plan"
    """The best drafts of the batch fill the row budget."""

    UNIFORM = "uniform"
    """Every request verifies its full draft, so that nothing is scored or selected."""

    EXPLORE = "explore"
    """As PLANNED, to learn about layers or row counts."""

    UNMEASURED = "unknown"
    """As PLANNED, while too few costs are known."""

    WARMUP = "warmup"
    """As PLANNED, for dummy requests before the server serves."""

    FALLBACK = "failed"
    """Full drafts, because the planner raised."""

    FIXED = "fixed"
    """All layers; the policy's gate decides which drafts are verified."""


#: Label in metrics of a uniform step without layers.
DRAFT_FREE = "draft_free"


@dataclass(frozen=True)
class StepPlan:
    """Drafts and rows of one step, equal on all ranks that share its requests."""

    kind: StepKind

    num_layers: int
    """d: draft layers. 0, of a uniform plan only: a draft-free step, which verifies the roots."""

    topk: int
    """Children of a draft; 1: chains."""

    row_budget: int
    """Rows of the target's forward over the batch, roots included."""

    full_draft_of: int | None = None
    """Index of the request whose full draft is verified, for exploration."""

    expected_ms: float | None = None
    """Expected milliseconds; ``None`` if unknown."""

    expected_drafts: tuple[float, ...] | None = None
    """Drafts over the batch that were forecast to be accepted, in each of d layers; ``None`` if
    nothing was forecast.
    """

    @property
    def reason(self) -> str:
        """The label in metrics."""
        return DRAFT_FREE if self.num_layers == 0 else self.kind.value


@dataclass(frozen=True)
class BatchView:
    """The next batch, as a planner sees it."""

    batch_size: int

    row_counts: Sequence[int]
    """Useful row counts, increasing; the last holds the full drafts of all requests."""

    depths: Sequence[int]
    """Layer counts that can be drafted, increasing."""

    context: int = 0
    """Tokens of context, over the whole batch."""

    num_constrained: int = 0
    """Requests whose sampling changes the target's distribution."""

    allows_uniform: bool = True
    """Whether every request may get the same number of rows."""

    allows_draft_free: bool = False
    """Whether draft-free steps may follow."""


class StepTimes(NamedTuple):
    """Milliseconds of a step, and the rows T of its target forward."""

    rows: int
    verify_ms: float
    draft_ms: float
    """After a draft-free step: the time of all draft extends, 0 if the burst goes on."""
    step_ms: float | None = None
    """``None`` if other work ran between this step and the next, and for dummy requests."""
    extends: int = 0
    """Draft extends after a draft-free step."""


@dataclass(frozen=True)
class StepRecord:
    """Outcome and times of a step."""

    plan: StepPlan
    batch_size: int
    context: int = 0

    outcome: tuple[Numbers, ...] = ()
    """Values per request that the planner learns from. Chains: confidences [B, d], drafts verified
    [B] and accepted [B]. Trees: depth, least confidence on the path, verified and accepted, each
    [B, n]. Empty if nothing was scored.
    """

    constrained: Numbers | None = None
    """[B] bool: requests whose sampling changes the target's distribution; ``None``: none."""

    num_correct: Numbers | None = None
    """[B] drafts accepted of each request; ``None`` if nothing was forecast."""

    times: StepTimes | None = None
    """``None`` if unknown."""

    def of_class(self, *, constrained: bool) -> tuple[Numbers, ...]:
        """Return the outcome of the requests of one class; empty if there are none."""
        if not self.outcome:
            return ()
        mask = self.constrained
        if mask is None:
            return () if constrained else self.outcome
        rows = np.flatnonzero(mask == constrained)
        return tuple(values[rows] for values in self.outcome) if len(rows) else ()

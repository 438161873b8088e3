"""Outcomes of the drafts of one class of requests.

The planner keeps two classes apart. A grammar, a penalty or a bias changes the target's
distribution, so the target rejects drafts for reasons that no confidence captures. The planner
plans such requests with the outcomes of their own drafts, and learns nothing from them for others.

Legend: S samples of drafts, D layers, d of them drafted, C confidences of a tree's layer, n drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_c2t.plan.forecast import Continuations, Forecast
from sglang_c2t.plan.grades import Grades
from sglang_c2t.plan.survival import Array, Numbers

#: First drafts that represent the traffic, of the last steps and of so many steps at most. In
#: between steps without scores, one step may be long ago.
RECENT = 128
RECENT_STEPS = 64

#: Continuations sampled per first draft, if there are enough first drafts.
WAYS = 4


class Acceptance:
    """Survival estimates, continuations of drafts, and grades of the gate's confidences.

    Args:
        survival: Estimates the survival of a draft from its confidence.
        max_depth: D.
        survivals: Gives the survival [S, d, ...] of confidences [S, d, ...] by ``survival``.
        layer: C of trees; ``None`` for chains.
    """

    def __init__(
        self,
        survival: Any,
        max_depth: int,
        survivals: Callable[[Array], Array],
        layer: int | None = None,
    ) -> None:
        self.survival = survival
        self.survivals = survivals
        self._shape = max_depth, layer
        self.predictions = Grades(max_depth)
        """Predicted survivals and outcomes, by depth."""
        self.grades = Grades()
        """Grades of the gate's confidences, before they are calibrated."""
        self.firsts: deque[Array] = deque(maxlen=RECENT_STEPS)
        """First layers [B] or [B, C] of the last steps."""
        self._forget_drafts()

    def expected(self, most: int) -> Array:
        """Return [about ``most``, D, ...]: survivals of drafts like the last ones."""
        if self.firsts:
            recent = self._recent()
            wanted = max(most // WAYS, 1)
            first = recent[np.linspace(0, len(recent) - 1, min(len(recent), wanted)).astype(int)]
        else:
            layer = self._shape[1]
            first = np.full(1 if layer is None else (1, layer), 0.5)
        return self._forecast(first, most)

    def _recent(self) -> Array:
        """Return the first layers of the last steps, oldest first."""
        found: list[Array] = []
        for first in reversed(self.firsts):
            found.append(first)
            if sum(map(len, found)) >= RECENT:
                break
        return np.concatenate(found[::-1])

    def refresh(self) -> None:
        """Drop cached forecasts, because the values of drafts have changed."""
        self._forecast.refresh()

    def reset(self) -> None:
        """Forget everything."""
        self.survival.reset()
        self._forget_drafts()
        self.firsts.clear()
        self.predictions.reset()
        self.grades.reset()

    def drafted(self, confidences: Array) -> None:
        """Record the ``confidences`` [B, d, ...] of drafts."""
        self._continuations.observe(confidences)

    def grade(self, depth: Numbers, confidence: Array, predicted: Array, survived: Numbers) -> None:
        """Count n verified drafts by ``confidence`` and by the survival ``predicted`` for them."""
        self.grades.observe(confidence, survived)
        self.predictions.observe(predicted, survived, depth - 1)

    def _forget_drafts(self) -> None:
        """Drop all recorded continuations."""
        max_depth, layer = self._shape
        self._continuations = Continuations(max_depth, width=layer)
        self._forecast = Forecast(self._continuations, self.survivals)

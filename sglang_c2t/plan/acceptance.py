"""What became of the drafts of one class of requests.

Two classes are kept apart. Where a grammar, a penalty or a bias changes the target's distribution,
the target rejects drafts for reasons that no confidence knows: such requests are planned with what
became of their own drafts, and teach nothing about those of others.

numpy only; knows neither torch nor SGLang.

Legend: S samples of drafts, D layers, d of them drafted, W the width of the drafts, n drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sglang_c2t.plan.forecast import Continuations, Forecast
from sglang_c2t.plan.grades import Grades
from sglang_c2t.plan.survival import Array, Numbers


class Estimator(Protocol):
    """Survival from confidences: :class:`~sglang_c2t.plan.survival.Survival` or another."""

    by_steps: bool
    """Whether it counts steps, and has to be told of each."""

    def of_chains(self, confidences: Array) -> Array: ...

    def learn(self, confidences: Array, num_drafts: Numbers, num_correct: Numbers) -> None: ...

    def parameters(self) -> list[Array]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def reset(self) -> None: ...


class Acceptance:
    """What confidences are worth, how drafts go on, and how good the gate's confidences are.

    Args:
        survival: What confidences are worth.
        max_depth: D.
        survivals: Gives the survival [S, d, ...] of confidences [S, d, ...] by ``survival``.
        nothing_seen: Makes the continuations of each width, empty.
    """

    def __init__(
        self,
        survival: Any,
        max_depth: int,
        survivals: Callable[[Array], Array],
        nothing_seen: Callable[[], Mapping[int, Continuations]],
    ) -> None:
        self.survival = survival
        self.survivals = survivals
        self._nothing_seen = nothing_seen
        self.predictions = Grades(max_depth)
        """Predicted survivals and outcomes, by depth."""
        self.grades = Grades()
        """Grades of the gate's confidences, before they are calibrated."""
        self._forget_drafts()

    def behind(self, first: Array, most: int, width: int) -> Array:
        """Survivals of about ``most`` drafts of a ``width`` whose ``first`` layers are these."""
        return self._forecasts[width](first, most)

    def refresh(self) -> None:
        """What drafts are worth has changed."""
        for forecast in self._forecasts.values():
            forecast.refresh()

    def reset(self) -> None:
        """Forget everything."""
        self.survival.reset()
        self._forget_drafts()
        self.predictions.reset()
        self.grades.reset()

    def drafted(self, width: int, confidences: Array) -> None:
        """Drafts of a ``width`` had these ``confidences`` [B, d, ...]."""
        self._continuations[width].observe(confidences)

    def grade(self, depth: Numbers, confidence: Array, predicted: Array, survived: Numbers) -> None:
        """Count n verified drafts by their ``confidence`` and the survival that was
        ``predicted``.
        """
        self.grades.observe(confidence, survived)
        self.predictions.observe(predicted, survived, depth - 1)

    def _forget_drafts(self) -> None:
        """Know of no draft how it goes on."""
        self._continuations = self._nothing_seen()
        self._forecasts = {
            width: Forecast(seen, self.survivals) for width, seen in self._continuations.items()
        }

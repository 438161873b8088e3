"""Which steps are made only to learn from, and what they may cost.

A plan keeps to what it knows, so that layers that are not drafted, and row counts that are not
verified, would keep the cost of a bad moment. A step now and then leaves the best plan for one of
these. What that loses is budgeted, and the interval between such steps doubles while they confirm
the best plan.

numpy only; knows neither torch nor SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_c2t.plan.cost import Curve
from sglang_c2t.plan.plan import Plan, Plans

#: Share of the time that exploration may lose.
SHARE = 0.005

#: Steps whose time a cold start may lose on top, for row counts measured only before it served:
#: whatever else the machine did then is in them.
COLD_START_BUDGET = 10.0

#: However much it seems to lose, all layers are drafted once in so many steps, and uniform steps
#: are tried; after a cold start at least whenever the age of the server has doubled.
AT_LEAST_EVERY = 500
FIRST = 16

#: Steps without so many layers before they are explored: at first, and at most once explored steps
#: have confirmed the best plan again and again.
UNSEEN = 16
UNSEEN_AT_MOST = 128

#: Steps within which the record of a step has surely arrived. Until it has, none is explored.
ARRIVES = 8

#: Steps of a cold start, in which one row count after the other is explored.
COLD_START = 400

#: Share of its time that a step with an unmeasured row count may seem to lose.
NEARLY = 0.1


class Exploration:
    """Keeps the cost of exploration, and when which layers were last drafted.

    Args:
        max_depth: D.
    """

    def __init__(self, max_depth: int) -> None:
        self.step = 0
        """Number of the step in progress."""
        self.budget = COLD_START_BUDGET
        """Steps that the cold start may still lose."""
        self._spent_ms = 0.0  # by all steps
        self._cost_ms = 0.0  # by explored ones
        self._drafted_at = [0] * (max_depth + 1)  # step that last drafted so many layers or more
        self._uniform_at = 0
        self._unseen_after = UNSEEN
        self._explored_at = -ARRIVES
        self._rows_at = -UNSEEN_AT_MOST  # step that last explored a row count
        self._turn = 0

    @property
    def waits(self) -> bool:
        """Whether the record of the last explored step has not arrived."""
        return self.step - self._explored_at < ARRIVES

    def arrived(self) -> None:
        """The record of an explored step has arrived."""
        self._explored_at = -ARRIVES

    def took(self, milliseconds: float) -> None:
        """A step took so long."""
        self._spent_ms += milliseconds

    def drafted(self, layers: int) -> None:
        """Drafts of so many ``layers`` were scored."""
        self._drafted_at[: layers + 1] = [self.step] * (layers + 1)

    def confirmed(self, same: bool) -> None:
        """The best plan was computed anew, and is the ``same`` as before, or is not."""
        if not same:
            self._unseen_after = UNSEEN

    def row_count(self, curve: Curve, plans: Plans, best: Plan) -> tuple[int, Plan] | None:
        """A row count whose cost is stale or unknown, and a plan with it. ``None``: none is worth
        leaving the ``best`` plan for.

        Stale counts come first, the one that would be best before others. Unknown ones, whose
        kernels may be better than those around them, are worth it where they are nearly best.
        """
        if self.step >= COLD_START and self.step - self._rows_at < self._unseen_after:
            return None
        tiers = plans.tiers.tolist()
        for untried, most in ((curve.stale, np.inf), (curve.unknown, NEARLY)):
            found = plans.best_that_fills(wanted) if (wanted := set(untried(tiers))) else None
            if found is None or cost_ms(found[1], best) > most * found[1].milliseconds:
                continue
            if self._within_budget(found[1], best) or self._affordable(found[1], best):
                self._explored_at = self._rows_at = self.step
                return found
        return None

    def layers(self, candidates: Sequence[Plan], plan: Plan, best: Plan) -> Plan | None:
        """One of the ``candidates`` that drafts layers unseen for a while; ``None``: none is due
        or affordable.

        Args:
            candidates: The best plan of each depth, rising.
            plan: Drafts, and shows, all layers up to its own.
            best: What is left for it, this or a uniform plan.
        """
        after = self._unseen_after
        others = [
            other
            for other in candidates
            if other.layers > plan.layers and self.step - self._drafted_at[other.layers] >= after
        ]
        if not others:
            return None
        deepest = others[-1]
        due = deepest is candidates[-1] and self._due(self._drafted_at[-1])
        other = deepest if due else others[self._turn % len(others)]
        if not due and not self._affordable(other, best):
            return None
        self._turn += 1
        self._unseen_after = min(2 * after, UNSEEN_AT_MOST)
        self.drafted(other.layers)
        self._explored_at = self.step
        return other

    def uniform(self, uniform: Plan, plan_rate: float, steps: int) -> bool:
        """Whether so many ``uniform`` steps may be tried in place of ones with ``plan_rate``."""
        lost = steps * max(uniform.milliseconds - uniform.tokens / plan_rate, 0.0)
        if not self._due(self._uniform_at) and not self._afford(lost):
            return False
        self._uniform_at = self.step
        return True

    def _due(self, last: int) -> bool:
        """Whether it is time, the last one being at that step, whatever it costs."""
        return self.step - last >= min(max(last, FIRST), AT_LEAST_EVERY)

    def _affordable(self, other: Plan, best: Plan) -> bool:
        return self._afford(cost_ms(other, best))

    def _afford(self, lost: float) -> bool:
        """Take ``lost`` milliseconds from the share of the time, if they are there. What was not
        spent in time is not saved up.
        """
        self._cost_ms = max(self._cost_ms, SHARE * self._spent_ms - lost)
        if self._cost_ms + lost > SHARE * self._spent_ms:
            return False
        self._cost_ms += lost
        return True

    def _within_budget(self, other: Plan, best: Plan) -> bool:
        """Take what is lost from the budget of the cold start, if it is there."""
        lost = cost_ms(other, best) / other.milliseconds
        if lost > self.budget:
            return False
        self.budget -= lost
        return True


def cost_ms(other: Plan, best: Plan) -> float:
    """Milliseconds that a step of the ``other`` plan takes longer for its tokens."""
    return max(other.milliseconds * (1.0 - other.rate / best.rate), 0.0)

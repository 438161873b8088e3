"""Which steps are made only to learn from, and how much time they may cost.

The planner plans with known costs, so layers and row counts that it does not use would keep the
cost of a slow moment. An exploration step sometimes leaves the best plan for one of these. Its
loss is budgeted, and the interval doubles while exploration confirms the best plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sglang_c2t.plan.cost import Curve
from sglang_c2t.plan.plan import Plan, Plans
from sglang_c2t.plan.verdicts import batch_bucket

#: Share of the time that exploration may cost.
SHARE = 0.005

#: Steps' worth of time that a cold start may spend in addition. It re-measures row counts known
#: only from before serving, when other work on the machine may have distorted them.
COLD_START_BUDGET = 10.0

#: Whatever the expected loss, all layers are drafted and uniform steps are tried once in so many
#: steps. After a cold start this also happens whenever the server's step count has doubled.
AT_LEAST_EVERY = 500
FIRST = 16

#: Steps without certain layers before they are explored: at first, and at most, after exploration
#: steps have confirmed the best plan repeatedly.
UNSEEN = 16
UNSEEN_AT_MOST = 128

#: Steps within which the record of a step has arrived. Until then no other step explores.
ARRIVES = 8

#: Steps of a cold start, which explores one row count after the other.
COLD_START = 400

#: Share of its time that a step may be expected to lose, if its row count is known from before
#: serving, or not at all. Other work may have made the former look half again as dear.
DISTORTED, NEARLY = 0.35, 0.1


class Exploration:
    """Budget of exploration, and the steps that last drafted each number of layers."""

    def __init__(self, max_depth: int) -> None:
        self.step = 0
        """Number of the step in progress."""
        self.budget = COLD_START_BUDGET
        """Steps' worth of time that the cold start may still lose."""
        self._spent_ms = 0.0  # by all steps
        self._cost_ms = 0.0  # by exploration steps
        self._drafted_at = [0] * (max_depth + 1)  # step that last drafted so many layers or more
        # Step that last tried uniform or draft-free steps, of about so many requests.
        self._tried_at: defaultdict[tuple[bool, int], int] = defaultdict(int)
        self._unseen_after = UNSEEN
        self._explored_at = -ARRIVES
        self._rows_at = -UNSEEN_AT_MOST  # step that last explored a row count
        self._turn = 0

    @property
    def waits(self) -> bool:
        """Whether the record of the last explored step has not arrived."""
        return self.step - self._explored_at < ARRIVES

    def arrived(self) -> None:
        """Note that the record of an exploration step has arrived."""
        self._explored_at = -ARRIVES

    def took(self, milliseconds: float) -> None:
        """Add the duration of a step to the time spent."""
        self._spent_ms += milliseconds

    def drafted(self, layers: int) -> None:
        """Note that the gate scored drafts of so many ``layers``."""
        self._drafted_at[: layers + 1] = [self.step] * (layers + 1)

    def confirmed(self, same: bool) -> None:
        """Note whether the new best plan is the ``same`` as before."""
        if not same:
            self._unseen_after = UNSEEN

    def row_count(self, curve: Curve, plans: Plans, best: Plan) -> tuple[int, Plan] | None:
        """Pick a row count whose cost is stale or unknown, and a plan with it. ``None`` if the
        ``best`` plan is better. Stale counts come first, in order of their best rate. Unknown ones
        may have faster kernels than their neighbours; they qualify if their rate is nearly the
        best.
        """
        if self.step >= COLD_START and self.step - self._rows_at < self._unseen_after:
            return None
        tiers = plans.tiers.tolist()
        for untried, most in ((curve.stale, DISTORTED), (curve.unknown, NEARLY)):
            found = plans.best_that_fills(wanted) if (wanted := set(untried(tiers))) else None
            if found is None or cost_ms(found[1], best) > most * found[1].milliseconds:
                continue
            if self._within_budget(found[1], best) or self._affordable(found[1], best):
                self._explored_at = self._rows_at = self.step
                return found
        return None

    def layers(self, candidates: Sequence[Plan], plan: Plan, best: Plan) -> Plan | None:
        """Return a candidate that drafts layers unseen for a while; ``None`` if none is due or
        affordable.

        Args:
            candidates: The best plan of each depth, increasing.
            plan: The current plan; it drafts and labels all layers up to its own.
            best: The plan that exploration replaces: ``plan`` or a uniform plan.
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

    def uniform(self, uniform: Plan, batch: int, plan_rate: float, steps: int) -> bool:
        """Whether ``steps`` uniform steps, or draft-free ones, of B requests may replace steps with
        ``plan_rate``.
        """
        kind = uniform.layers == 0, batch_bucket(batch)
        lost = steps * max(uniform.milliseconds - uniform.tokens / plan_rate, 0.0)
        if not self._due(self._tried_at[kind]) and not self._afford(lost):
            return False
        self._tried_at[kind] = self.step
        return True

    def _due(self, last: int) -> bool:
        """Whether exploration is due at any cost, if the last one was at step ``last``."""
        return self.step - last >= min(max(last, FIRST), AT_LEAST_EVERY)

    def _affordable(self, other: Plan, best: Plan) -> bool:
        return self._afford(cost_ms(other, best))

    def _afford(self, lost: float) -> bool:
        """Take ``lost`` milliseconds from the share of the time, if available. Unused time
        expires.
        """
        self._cost_ms = max(self._cost_ms, SHARE * self._spent_ms - lost)
        if self._cost_ms + lost > SHARE * self._spent_ms:
            return False
        self._cost_ms += lost
        return True

    def _within_budget(self, other: Plan, best: Plan) -> bool:
        """Take the loss from the cold start budget, if available."""
        lost = cost_ms(other, best) / other.milliseconds
        if lost > self.budget:
            return False
        self.budget -= lost
        return True


def cost_ms(other: Plan, best: Plan) -> float:
    """Return the milliseconds that the ``other`` plan takes longer for its tokens."""
    return max(other.milliseconds * (1.0 - other.rate / best.rate), 0.0)

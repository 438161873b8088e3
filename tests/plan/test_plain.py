"""Plain steps: the best of them, and when they begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.plain import (
    ENOUGH,
    LATELY,
    REMEMBERED,
    TYPICAL,
    PlainSteps,
    best_alike,
    tokens_alike,
)
from sglang_c2t.plan.plan import Plan


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 4), st.sampled_from((1, 2, 3)))
def test_nothing_else_that_is_alike_for_all_has_a_higher_rate(
    seed: int, batch: int, depth: int, width: int
) -> None:
    """Of each sample its most likely drafts, as many of each. Of trees there is room for a whole
    path; chains are verified whole, or not drafted.
    """
    rng = np.random.default_rng(seed)
    survival = np.cumprod(rng.uniform(0.1, 1.0, (5, depth, width)), axis=1)
    whole = lambda layers: min(1 + layers * width, 8)  # noqa: E731
    verify, layer = rng.uniform(1, 20, batch * 8 + 1), rng.uniform(0, 3)

    def cost(rows: np.ndarray, _batch: int, layers: Sequence[int]) -> np.ndarray:
        return verify[rows] + layer * (np.array(layers)[:, None] - 1)

    found = best_alike(survival, batch, cost, whole=whole, width=width)
    rates = {(1, batch): batch / verify[batch]} if width == 1 else {}
    for layers in range(1, depth + 1):
        for rows in range(1 + layers, whole(layers) + 1):
            gained = [sum(sorted(draft[:layers].ravel())[-(rows - 1) :]) for draft in survival]
            took = verify[batch * rows] + layer * (layers - 1)
            rates[layers, batch * rows] = batch * (1 + np.mean(gained)) / took
    assert found.rate == pytest.approx(max(rates.values()))
    assert found.rate == pytest.approx(rates[found.layers, found.rows])
    assert found.width == width
    assert tokens_alike(found, survival, batch) == pytest.approx(found.tokens)


def test_a_run_ends_behind_its_last_step_and_waits_while_the_batch_is_another() -> None:
    steps, plan = PlainSteps(), Plan(3, 64 * 4, 100.0, 10.0)
    assert steps.next(64) is None, "nobody began"
    steps.begin(64, plan, 3)
    assert steps.next(64) == plan
    assert steps.next(63) == plan._replace(rows=63 * 4), "about as many"
    assert steps.next(64) == plan
    assert steps.next(64) is None
    steps.begin(64, plan, 2)
    assert steps.next(64) == plan
    assert steps.next(48) is None, "nobody began one of these"
    steps.begin(48, plan._replace(rows=48 * 2), 1)
    assert steps.next(64) == plan
    assert steps.next(64) is None
    assert steps.next(48) == plan._replace(rows=48 * 2)
    assert steps.next(48) is None


ALIKE = Plan(3, 16, 10.0, 100.0)


def test_planned_steps_are_known_by_their_batch_and_by_what_they_brought_lately() -> None:
    steps = PlainSteps()
    for _ in range(ENOUGH):
        assert steps.gain(4) is None
        steps.planned(4, Plan(3, 12, 12.0, 100.0), ALIKE)
    assert steps.gain(4) == pytest.approx(0.02)
    assert steps.gain(8) is None
    for _ in range(5 * REMEMBERED):
        steps.planned(4, Plan(3, 12, 12.0, 150.0), ALIKE)
    assert steps.gain(4) == pytest.approx(0.08 - 0.1, rel=0.02)


def test_a_slow_minute_says_nothing_of_planned_steps() -> None:
    """Both kinds are priced at the same moment."""
    steps = PlainSteps()
    for slow in (1.0, 3.0):
        for _ in range(ENOUGH):
            planned, alike = (
                plan._replace(milliseconds=slow * plan.milliseconds)
                for plan in (Plan(3, 12, 10.1, 100.0), ALIKE)
            )
            steps.planned(4, planned, alike)
    assert 0.0 < steps.gain(4) < 0.002


def test_kinds_are_judged_by_what_they_really_took() -> None:
    """Planned steps took a tenth longer than the costs said, plain ones did not; a single pause
    says nothing, nor what another batch took.
    """
    steps = PlainSteps()
    for _ in range(LATELY):
        steps.took(4, 1.1, plain=False)
    steps.took(4, 50.0, plain=False)
    steps.took(8, 3.0, plain=False)
    for _ in range(ENOUGH):
        steps.planned(4, Plan(3, 12, 10.5, 100.0), ALIKE)
    assert steps.gain(4) > 0.0, "both are slower, so far as is known"
    steps.took(4, 1.0, plain=True)
    for _ in range(5 * REMEMBERED):
        steps.planned(4, Plan(3, 12, 10.5, 100.0), ALIKE)
    assert steps.gain(4) == pytest.approx((10.5 - 11.0) / 110, rel=0.02)


def test_plain_steps_are_compared_by_what_all_of_them_bring_in_all_their_time() -> None:
    """Planned ones are short where drafts are bad, and plain ones are not for that worth more."""
    steps = PlainSteps()
    for _ in range(ENOUGH):
        steps.planned(4, Plan(1, 4, 4.0, 50.0), Plan(3, 16, 4.0, 100.0))
        steps.planned(4, Plan(5, 24, 16.0, 150.0), Plan(3, 16, 16.0, 100.0))
    assert steps.gain(4) == pytest.approx(0.0, abs=0.01)


def test_the_last_first_drafts_stand_for_the_traffic() -> None:
    """The best plain step for them is looked for now and then; other batches have their own."""
    steps, asked = PlainSteps(), []

    def best(first: np.ndarray) -> Plan:
        asked.append(first)
        return ALIKE._replace(tokens=float(len(asked)))

    for value in np.linspace(0, 1, 3 * TYPICAL):
        found = steps.usual(4, np.array([value]), best)
    assert len(asked) == 3 * TYPICAL / ENOUGH
    assert found.tokens == len(asked)
    assert len(asked[-1]) == TYPICAL
    assert asked[-1].min() > 0.6
    assert steps.usual(5, np.array([1.0]), best).tokens == len(asked)

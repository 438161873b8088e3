"""Each cause is named first on a server that has it, and none on a server that has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.advice import (
    ENOUGH,
    Facts,
    Finding,
    Fine,
    Grades,
    Outlook,
    grades_of,
    judged,
    useful_depth,
)
from sglang_c2t.offline.advise import advice_text

#: Tokens a millisecond grow with the requests, up to 64 of them.
OUTLOOK = [
    Outlook(requests, 1, 2, 2.0 * requests, 30.0 + 0.3 * requests)
    for requests in (1, 2, 4, 8, 16, 32, 64)
]

GOOD = Grades(drafts=900, promised=0.82, survived=0.8, auc=0.9, auc_error=0.01)

#: 10 s of 100 steps with 32 requests: of 2 drafts each 1.5 are accepted.
HEALTHY = Facts(
    seconds=10.0, policy="auto", plans=True, packed=True, num_steps=5, topk=1, num_draft_tokens=6,
    max_running=64, running=32.0, queued=0.0, steps=100, verifications=3200, proposed=6400,
    correct=4800, padding=0, planned=100, planned_layers=200,
    predicted_seconds=9.8, measured_seconds=10.0, quartiles=(0.95, 1.05), median=1.0,
    outlook=OUTLOOK, grades=GOOD, accepted_at_least={1: 2600, 2: 1400, 3: 500, 4: 200, 5: 100},
    verified_at_least={1: 3200, 2: 3200}, kv_used=0.4,
    classifier={"heldout_auc": 0.93, "heldout_ece": 0.01, "origins": ["eagle3 for target"],
                "name": "c2t-plus", "learnt_from": "several pairs"},
)  # fmt: skip

#: The same with a gate that knows no load.
GATED = replace(
    HEALTHY, policy="c2t-plus", plans=False, planned=0, planned_layers=0,
    measured_seconds=0, predicted_seconds=0, quartiles=(), median=None, outlook=(),
    policy_stops=1600, gate_seconds=0.2, row_ms=(0.2, 0.01),
)  # fmt: skip

#: Drafts of whatever was drafted, all of them verified.
FIXED = replace(GATED, policy="fixed", classifier=None, grades=None, policy_stops=0)


def first(facts: Facts) -> Finding:
    found, _ = judged(facts)
    assert found, "nothing was found"
    return found[0]


@pytest.mark.parametrize("facts", [HEALTHY, GATED], ids=["planned", "gated"])
def test_a_healthy_server_gets_no_advice_and_is_told_so_with_its_numbers(facts: Facts) -> None:
    found, fine = judged(facts)
    assert found == []
    assert {"queue", "packing", "classifier", "steps", "policy", "host"} <= {o.name for o in fine}
    numbers = [any(map(str.isdigit, one.sentence)) for one in fine if one.name != "policy"]
    assert all(numbers)
    text = advice_text(facts)
    assert "Nothing to change." in text
    assert "800 tokens/s at 32.0 requests at once" in text
    assert "of 900 verified" in text


def test_requests_that_wait_behind_the_limit_are_worth_what_the_planner_expects() -> None:
    """0.933 tokens a millisecond at 48 beside 1.306 at 64, drawn between 32 and 64."""
    full = replace(HEALTHY, max_running=48, running=48.0, queued=16.0, verifications=4800)
    found = first(full)
    assert found.name == "queue"
    assert found.settings == {"--max-running-requests": "64"}
    assert "16 requests wait while 48 run: no more than 48 may" in found.sentence
    assert found.cost is not None
    rates = {o.requests: o.tokens / o.milliseconds for o in OUTLOOK}
    at_48 = np.interp(np.log2(48), [5, 6], [rates[32], rates[64]])
    gains = [rates[64] / at_48 * error - 1 for error in (0.95, 1.05)]
    assert [found.cost.low, found.cost.high] == pytest.approx([g * full.tokens for g in gains])
    assert "within -5% and +5%" in found.cost.known_by


def test_where_more_at_once_brings_nothing_another_replica_is_advised() -> None:
    flat = [Outlook(n, 1, 2, 2.0 * n, float(n) ** 1.2) for n in (1, 8, 48, 64)]
    found = first(replace(HEALTHY, max_running=48, running=47.0, queued=16.0, outlook=flat,
                          quartiles=(0.99, 1.01)))  # fmt: skip
    assert found.name == "queue"
    assert found.settings == {}
    assert "add a replica" in found.do


def test_a_queue_without_prices_is_bounded_and_says_so() -> None:
    found = first(replace(GATED, max_running=32, queued=16.0))
    assert found.cost is not None
    assert (found.cost.low, found.cost.high) == (0.0, pytest.approx(GATED.tokens / 2))
    assert "no prices were measured, as c2t-plus does not plan" in found.cost.known_by


def test_a_limit_below_what_was_asked_for_is_memory_s() -> None:
    found = first(replace(HEALTHY, max_running=32, queued=16.0, requested_running=64))
    assert "64 were asked for, and the server's memory holds 32" in found.sentence
    assert "--mem-fraction-static" in found.do
    assert found.settings == {}


@pytest.mark.parametrize("short", [{"kv_used": 0.97}, {"retracted": 3.0}])
def test_a_queue_before_a_full_kv_cache_is_its_fault(short: dict[str, float]) -> None:
    found = first(replace(HEALTHY, queued=8.0, **short))
    assert found.name == "KV cache"
    assert f"{short.get('kv_used', 0.4):.0%} of the KV cache is used" in found.sentence


def test_a_queue_that_is_being_admitted_is_no_cause() -> None:
    """Neither the limit nor memory holds it up."""
    assert judged(replace(HEALTHY, queued=8.0))[0] == []


def test_trees_that_are_not_planned_are_named_under_load_only() -> None:
    trees = replace(FIXED, policy="eagle2", topk=4, num_draft_tokens=16, proposed=48_000)
    found = first(trees)
    assert found.name == "trees"
    assert found.settings["--speculative-eagle-topk"] == "1"
    assert found.settings["--speculative-num-draft-tokens"] == "6"
    assert "84% of all rows are rejected" in found.sentence
    quiet = replace(trees, running=4.0, steps=800)
    assert judged(quiet)[0] == []
    planned = replace(trees, policy="auto", plans=True, planned=100, planned_layers=220)
    assert all(one.name != "trees" for one in judged(planned)[0])


@pytest.mark.parametrize(
    ("why", "do"),
    [
        ("--c2t-verify static asks for it", "leave out --c2t-verify static"),
        ("attention backend X does not say that it reads packed rows", "FA3 or FlashInfer"),
    ],
)
def test_rows_that_nobody_asked_for_are_named_with_why_they_are_there(why: str, do: str) -> None:
    found = first(replace(GATED, packed=False, unpacked_because=why, padding=9600.0))
    assert found.name == "packing"
    assert why in found.sentence
    assert "96 of 192 rows a step (50%)" in found.sentence
    assert do in found.do
    # 96 rows of 0.2 ms of a step of 100 ms.
    assert found.cost is not None
    assert found.cost.low < 800 * (1 / (1 - 0.192) - 1) < found.cost.high


def test_rows_cost_no_more_than_the_share_that_they_have() -> None:
    """Whatever a row seems to take; and no fewer than none."""
    dear = replace(GATED, packed=False, unpacked_because="x", padding=9600.0, row_ms=(9.0, 5.0))
    cost = first(dear).cost
    assert cost is not None
    assert (cost.low, cost.high) == (pytest.approx(0.0, abs=1e-9), pytest.approx(800.0))


def test_a_gate_that_promises_more_than_survives_is_named_with_both_numbers() -> None:
    found = first(replace(GATED, grades=GOOD._replace(promised=0.97, survived=0.4)))
    assert found.name == "classifier"
    assert "promised that 97% survive, and 40% (+-3%) did" in found.sentence
    learnt = "c2t-plus learnt from several pairs (eagle3 for target)"
    assert f"{learnt}, and was off by 1% there" in found.sentence


def test_a_gate_that_promises_less_ends_drafts_that_would_survive() -> None:
    found = first(replace(GATED, grades=GOOD._replace(promised=0.4, survived=0.9)))
    assert found.name == "classifier"
    assert found.cost is not None
    assert found.cost.high == pytest.approx(1600 * 0.9 / 10)
    assert "it ended 50% of the drafts" in found.sentence


def test_what_a_classifier_was_off_by_where_it_was_trained_is_no_news() -> None:
    """Those trained with evened classes are off everywhere."""
    off = replace(GATED, grades=GOOD._replace(promised=0.95))
    assert [one.name for one in judged(off)[0]] == ["classifier"]
    assert judged(replace(off, classifier={"heldout_ece": 0.15}))[0] == []


@pytest.mark.parametrize("facts", [HEALTHY, GATED])
@pytest.mark.parametrize("grades", [GOOD, None])
def test_a_classifier_that_is_no_cause_is_told_with_the_pair_that_it_learnt_from(
    facts: Facts, grades: Grades | None
) -> None:
    found, fine = judged(replace(facts, grades=grades))
    (told,) = [one.sentence for one in fine if one.name == "classifier"]
    assert "classifier" not in [one.name for one in found]
    assert "c2t-plus learnt from several pairs (eagle3 for target)" in told


def test_a_server_that_tells_of_no_pair_has_an_unknown_one() -> None:
    """One of an earlier version; and one whose policy reads no classifier has none to tell of."""
    found = first(replace(GATED, classifier={}, grades=GOOD._replace(promised=0.97, survived=0.4)))
    assert found.name == "classifier"
    older = replace(GATED, classifier={"heldout_ece": 0.01}, grades=None)
    (told,) = [one.sentence for one in judged(older)[1] if one.name == "classifier"]
    assert told == "it learnt from an unknown pair (of unknown names)"
    assert "classifier" not in [one.name for one in judged(FIXED)[1]]


def test_few_drafts_blame_no_classifier() -> None:
    few = Grades(ENOUGH - 1, 0.97, 0.4, 0.9, 0.05)
    assert all(one.name != "classifier" for one in judged(replace(GATED, grades=few))[0])


def test_plans_calibrate_what_is_promised_but_not_what_is_ranked() -> None:
    wrong = replace(HEALTHY, grades=GOOD._replace(promised=0.3))
    assert judged(wrong)[0] == []
    found = first(replace(HEALTHY, grades=GOOD._replace(auc=0.52)))
    assert found.name == "classifier"
    assert "AUC 0.52, where 0.50 is chance; c2t-plus learnt from" in found.sentence
    assert "and had 0.93 there" in found.sentence


def of_steps(num_steps: int, reach: float) -> Facts:
    """All drafts are verified, and each survives with so much of those before it."""
    accepted = {d: 3200 * reach**d for d in range(1, num_steps + 1)}
    return replace(
        FIXED, num_steps=num_steps, num_draft_tokens=num_steps + 1, proposed=3200 * num_steps,
        correct=sum(accepted.values()), accepted_at_least=accepted,
        verified_at_least=dict.fromkeys(range(1, num_steps + 1), 3200),
    )  # fmt: skip


def test_steps_beyond_what_survives_are_named_with_the_depth_that_does() -> None:
    """Of 0.6 ** depth the fifth is 8 percent, the sixth under 5."""
    found = first(of_steps(16, 0.6))
    assert found.name == "steps"
    assert found.settings["--speculative-num-steps"] == "5"
    assert found.settings["--speculative-num-draft-tokens"] == "6"
    assert "65% of all rows lie behind the first 5" in found.sentence
    assert found.cost is not None
    assert 0 < found.cost.low < found.cost.high


def test_tokens_that_shorter_drafts_lose_are_taken_off_what_they_save() -> None:
    deep = replace(of_steps(16, 0.6), row_ms=(0.1, 0.0))
    deeper = sum(3200 * 0.6**d for d in range(6, 17)) / (deep.verifications + deep.correct)
    saved = 3200 * 11 / 100 * 0.1 / 100  # rows a step, of so many milliseconds, of 100
    cost = first(deep).cost
    assert cost is not None
    assert cost.low == pytest.approx(deep.tokens * ((1 - deeper) / (1 - saved) - 1))
    free = replace(of_steps(16, 0.6), row_ms=(0.0, 0.0))
    (steps,) = [one for one in _all(free) if one.name == "steps"]
    assert isinstance(steps, Fine)  # 1.5 percent of the tokens lie deeper, and rows cost nothing


def _all(facts: Facts) -> list[Any]:
    found, fine = judged(facts)
    return [*found, *fine]


def test_a_policy_that_knows_no_load_is_named_where_steps_are_not_to_blame() -> None:
    found = first(of_steps(4, 0.5))
    assert found.name == "policy"
    assert found.settings == {"--c2t-policy": "default"}
    assert all(one.name != "policy" for one in judged(replace(of_steps(4, 0.5), running=4.0))[0])


def test_drafts_that_mostly_survive_whole_could_be_longer() -> None:
    deep = replace(
        HEALTHY, planned_layers=500, accepted_at_least=dict.fromkeys(range(1, 6), 2000.0)
    )
    found = first(deep)
    assert found.settings["--speculative-num-steps"] == "7"


def test_what_cannot_be_priced_comes_last_and_says_why() -> None:
    both = replace(
        HEALTHY, max_running=32, queued=8.0, median=0.5, unplanned=60.0, quartiles=(0.4, 0.6)
    )
    found, _ = judged(both)
    assert [one.name for one in found] == ["queue", "predictions", "prices"]
    assert [one.cost is None for one in found] == [False, True, True]
    assert "no number can be given" in advice_text(both)


def test_a_policy_that_fails_is_named() -> None:
    found = first(replace(FIXED, failures=100.0))
    assert found.name == "policy failures"
    assert "failed in 100 of 100 steps" in found.sentence


@given(
    st.floats(0, 200), st.floats(1, 64), st.floats(0, 1), st.floats(0, 1),
    st.sampled_from([HEALTHY, GATED, FIXED]), st.booleans(), st.integers(1, 8),
)  # fmt: skip
def test_causes_are_ordered_by_cost_and_each_says_its_numbers(
    queued: float, running: float, survived: float, padding: float,
    facts: Facts, packed: bool, topk: int,
) -> None:  # fmt: skip
    changed = replace(
        facts, queued=queued, running=running, packed=packed, topk=topk,
        unpacked_because=None if packed else "y", padding=padding * 10_000,
        grades=GOOD._replace(survived=survived) if facts.grades else None,
    )  # fmt: skip
    found, _ = judged(changed)
    highs = [one.cost.high if one.cost else -1.0 for one in found]
    assert highs == sorted(highs, reverse=True)
    for one in found:
        assert any(letter.isdigit() for letter in one.sentence)
        assert one.cost is None or one.cost.low <= one.cost.high
    assert advice_text(changed, doctor=True)


def test_of_two_findings_that_set_a_flag_the_more_costly_wins() -> None:
    text = advice_text(replace(of_steps(16, 0.6), gate_seconds=5.0))
    assert text.count("--speculative-num-steps 16 -> 5 (steps)") == 1
    assert "--c2t-policy fixed -> default (host)" in text


def test_the_deepest_useful_draft_survives_more_than_seldom() -> None:
    assert useful_depth(of_steps(16, 0.6)) == 5
    assert useful_depth(of_steps(4, 0.9)) == 4
    assert useful_depth(replace(FIXED, verifications=ENOUGH - 1)) is None


def test_grades_of_replicas_are_counted_together() -> None:
    """Bins 0.1 and 0.9: of 10 and 30 drafts 4 and 26 survive; half of a bin's pairs are right."""
    one = {"drafts": [10.0, 10.0], "promised": [1.0, 9.0], "survived": [4.0, 6.0]}
    other = {"drafts": [0.0, 20.0], "promised": [0.0, 18.0], "survived": [0.0, 20.0]}
    grades = grades_of([one, other])
    assert grades is not None
    assert (grades.drafts, grades.promised, grades.survived) == (40.0, 0.7, 0.75)
    pairs = 26 * 6 + 0.5 * (26 * 4 + 4 * 6)
    assert grades.auc == pytest.approx(pairs / (30 * 10))
    assert grades_of([]) is None
    assert grades_of([{name: [0.0] for name in one}]) is None

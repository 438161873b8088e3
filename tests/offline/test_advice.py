"""Each cause is named first on a server that has it, and none on a server that has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.advice import ENOUGH, Facts, Finding, Fine, judge, useful_depth
from sglang_c2t.offline.advise import advice_text
from sglang_c2t.plan.grades import Summary

#: Tokens a millisecond grow with the requests, up to 64 of them.
RATES = {n: 2.0 * n / (30.0 + 0.3 * n) for n in (1, 2, 4, 8, 16, 32, 64)}

GOOD = Summary(drafts=900, promised=0.82, survived=0.8, auc=0.9, auc_error=0.01)

#: 10 s of 100 steps with 32 requests: of 2 drafts each 1.5 are accepted.
HEALTHY = Facts(
    seconds=10.0, policy="auto", plans=True, packed=True, num_steps=5, topk=1, num_draft_tokens=6,
    max_running=64, running=32.0, queued=0.0, steps=100, verifications=3200, proposed=6400,
    correct=4800, padding=0, planned=100, planned_layers=200,
    rates=RATES, grades=GOOD, accepted_at_least={1: 2600, 2: 1400, 3: 500, 4: 200, 5: 100},
    verified_at_least={1: 3200, 2: 3200}, kv_used=0.4,
    classifier={"heldout_auc": 0.93, "heldout_ece": 0.01, "origins": ["eagle3 for target"],
                "name": "c2t-plus", "learnt_from": "several pairs"},
)  # fmt: skip

#: The same with a gate that knows no load.
GATED = replace(
    HEALTHY, policy="c2t-plus", plans=False, planned=0, planned_layers=0, rates={},
    policy_stops=1600, row_ms=(0.2, 0.01),
)  # fmt: skip

#: Drafts of whatever was drafted, all of them verified.
FIXED = replace(GATED, policy="fixed", classifier=None, grades=None, policy_stops=0)


def first(facts: Facts) -> Finding:
    found, _ = judge(facts)
    assert found, "nothing was found"
    return found[0]


@pytest.mark.parametrize("facts", [HEALTHY, GATED], ids=["planned", "gated"])
def test_a_healthy_server_gets_no_advice_and_is_told_so_with_its_numbers(facts: Facts) -> None:
    found, fine = judge(facts)
    assert found == []
    assert {"queue", "packing", "classifier", "steps", "policy"} <= {o.name for o in fine}
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
    at_48 = np.interp(np.log2(48), [5, 6], [RATES[32], RATES[64]])
    assert found.gain.high == pytest.approx((RATES[64] / at_48 - 1) * full.tokens)
    assert found.gain.low == 0.0
    assert "by the planner's costs" in found.gain.known_by


def test_where_more_at_once_brings_nothing_another_replica_is_advised() -> None:
    falling = {n: 2.0 * n / n**1.2 for n in (1, 8, 48, 64)}
    found = first(replace(HEALTHY, max_running=48, running=47.0, queued=16.0, rates=falling))
    assert found.name == "queue"
    assert found.settings == {}
    assert "add a replica" in found.do


def test_a_queue_without_prices_is_bounded_and_says_so() -> None:
    found = first(replace(GATED, max_running=32, queued=16.0))
    assert (found.gain.low, found.gain.high) == (0.0, pytest.approx(GATED.tokens / 2))
    assert "c2t-plus measures no cost" in found.gain.known_by


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
    assert judge(replace(HEALTHY, queued=8.0))[0] == []


def test_trees_that_are_not_planned_are_named_under_load_only() -> None:
    trees = replace(FIXED, policy="eagle2", topk=4, num_draft_tokens=16, proposed=48_000)
    found = first(trees)
    assert found.name == "trees"
    assert found.settings["--speculative-eagle-topk"] == "1"
    assert found.settings["--speculative-num-draft-tokens"] == "6"
    assert "84% of all rows are rejected" in found.sentence
    quiet = replace(trees, running=4.0, steps=800)
    assert judge(quiet)[0] == []
    planned = replace(trees, policy="auto", plans=True, planned=100)
    assert all(one.name != "trees" for one in judge(planned)[0])


@pytest.mark.parametrize(
    ("why", "do"),
    [
        ("--c2t-verify static asks for it", "--c2t-verify auto"),
        ("attention backend X does not say that it reads packed rows", "fa3 or flashinfer"),
    ],
)
def test_rows_that_nobody_asked_for_are_named_with_why_they_are_there(why: str, do: str) -> None:
    found = first(replace(GATED, packed=False, unpacked_because=why, padding=9600.0))
    assert found.name == "packing"
    assert why in found.sentence
    assert "96 of 192 rows a step (50%)" in found.sentence
    assert do in found.do
    # 96 rows of 0.2 ms of a step of 100 ms.
    assert found.gain.low < 800 * (1 / (1 - 0.192) - 1) < found.gain.high


def test_rows_cost_no_more_than_the_share_that_they_have() -> None:
    """Whatever a row seems to take; and no fewer than none."""
    dear = replace(GATED, packed=False, unpacked_because="x", padding=9600.0, row_ms=(9.0, 5.0))
    cost = first(dear).gain
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
    assert found.gain.high == pytest.approx(1600 * 0.9 / 10)
    assert "it ended 50% of the drafts" in found.sentence


def test_what_a_classifier_was_off_by_where_it_was_trained_is_no_news() -> None:
    """Those trained with evened classes are off everywhere."""
    off = replace(GATED, grades=GOOD._replace(promised=0.95))
    assert [one.name for one in judge(off)[0]] == ["classifier"]
    assert judge(replace(off, classifier={"heldout_ece": 0.15}))[0] == []


@pytest.mark.parametrize("facts", [HEALTHY, GATED])
@pytest.mark.parametrize("grades", [GOOD, None])
def test_a_classifier_that_is_no_cause_is_told_with_the_pair_that_it_learnt_from(
    facts: Facts, grades: Summary | None
) -> None:
    found, fine = judge(replace(facts, grades=grades))
    (told,) = [one.sentence for one in fine if one.name == "classifier"]
    assert "classifier" not in [one.name for one in found]
    assert "c2t-plus learnt from several pairs (eagle3 for target)" in told


def test_a_server_that_tells_of_no_pair_has_an_unknown_one() -> None:
    """One of an earlier version; and one whose policy reads no classifier has none to tell of."""
    found = first(replace(GATED, classifier={}, grades=GOOD._replace(promised=0.97, survived=0.4)))
    assert found.name == "classifier"
    older = replace(GATED, classifier={"heldout_ece": 0.01}, grades=None)
    (told,) = [one.sentence for one in judge(older)[1] if one.name == "classifier"]
    assert told == "it learnt from an unknown pair (of unknown names)"
    assert "classifier" not in [one.name for one in judge(FIXED)[1]]


def test_few_drafts_blame_no_classifier() -> None:
    few = Summary(ENOUGH - 1, 0.97, 0.4, 0.9, 0.05)
    assert all(one.name != "classifier" for one in judge(replace(GATED, grades=few))[0])


def test_plans_calibrate_what_is_promised_but_not_what_is_ranked() -> None:
    wrong = replace(HEALTHY, grades=GOOD._replace(promised=0.3))
    assert judge(wrong)[0] == []
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
    assert "65% of all rows are deeper than 5" in found.sentence
    assert 0 < found.gain.low < found.gain.high


def test_tokens_that_shorter_drafts_lose_are_taken_off_what_they_save() -> None:
    deep = replace(of_steps(16, 0.6), row_ms=(0.1, 0.0))
    deeper = sum(3200 * 0.6**d for d in range(6, 17)) / (deep.verifications + deep.correct)
    saved = 3200 * 11 / 100 * 0.1 / 100  # rows a step, of so many milliseconds, of 100
    cost = first(deep).gain
    assert cost.low == pytest.approx(deep.tokens * ((1 - deeper) / (1 - saved) - 1))
    free = replace(of_steps(16, 0.6), row_ms=(0.0, 0.0))
    (steps,) = [one for one in _all(free) if one.name == "steps"]
    assert isinstance(steps, Fine)  # 1.5 percent of the tokens lie deeper, and rows cost nothing


def _all(facts: Facts) -> list[Any]:
    found, fine = judge(facts)
    return [*found, *fine]


def test_a_policy_that_knows_no_load_is_named_where_steps_are_not_to_blame() -> None:
    found = first(of_steps(4, 0.5))
    assert found.name == "policy"
    assert found.settings == {"--c2t-policy": "default"}
    assert all(one.name != "policy" for one in judge(replace(of_steps(4, 0.5), running=4.0))[0])


def test_drafts_that_mostly_survive_whole_could_be_longer() -> None:
    deep = replace(
        HEALTHY, planned_layers=500, accepted_at_least=dict.fromkeys(range(1, 6), 2000.0)
    )
    found = first(deep)
    assert found.settings["--speculative-num-steps"] == "7"


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
    found, _ = judge(changed)
    highs = [one.gain.high for one in found]
    assert highs == sorted(highs, reverse=True)
    for one in found:
        assert any(letter.isdigit() for letter in one.sentence)
        assert one.gain.low <= one.gain.high
    assert advice_text(changed, doctor=True)


def test_advice_text_lists_each_flag_now_and_then() -> None:
    trees = replace(FIXED, policy="eagle2", topk=4, num_draft_tokens=16, proposed=48_000)
    text = advice_text(replace(trees, max_running=32, queued=64.0))
    assert "--speculative-eagle-topk 4 -> 1 (trees)" in text
    assert "--max-running-requests 32 -> 96 (queue)" in text
    assert "--speculative-num-steps 5 (stays)" in text


def test_the_deepest_useful_draft_survives_more_than_seldom() -> None:
    assert useful_depth(of_steps(16, 0.6)) == 5
    assert useful_depth(of_steps(4, 0.9)) == 4
    assert useful_depth(replace(FIXED, verifications=ENOUGH - 1)) is None

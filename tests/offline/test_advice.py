"""Each cause is named first on a server that has it, and none on a server that has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.advice import ENOUGH, Facts, Finding, judge, useful_depth
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


def of_steps(num_steps: int, reach: float) -> Facts:
    """All drafts are verified, and each survives with so much of those before it."""
    accepted = {d: 3200 * reach**d for d in range(1, num_steps + 1)}
    return replace(
        FIXED, num_steps=num_steps, num_draft_tokens=num_steps + 1, proposed=3200 * num_steps,
        correct=sum(accepted.values()), accepted_at_least=accepted,
        verified_at_least=dict.fromkeys(range(1, num_steps + 1), 3200),
    )  # fmt: skip


FULL = replace(HEALTHY, max_running=48, running=48.0, queued=16.0, verifications=4800)
FALLING = {n: 2.0 * n / n**1.2 for n in (1, 8, 48, 64)}
TREES = replace(FIXED, policy="eagle2", topk=4, num_draft_tokens=16, proposed=48_000)
UNPACKED = replace(GATED, packed=False, padding=9600.0)
OFF = GOOD._replace(promised=0.97, survived=0.4)
LEARNT = "c2t-plus learnt from several pairs (eagle3 for target)"


def first(facts: Facts) -> Finding:
    found, _ = judge(facts)
    assert found, "nothing was found"
    return found[0]


@pytest.mark.parametrize("facts", [HEALTHY, GATED], ids=["planned", "gated"])
@pytest.mark.parametrize("grades", [GOOD, None])
def test_advice_of_a_healthy_server_is_its_numbers(facts: Facts, grades: Summary | None) -> None:
    found, fine = judge(replace(facts, grades=grades))
    assert found == []
    assert {"queue", "packing", "classifier", "steps", "policy"} <= {o.name for o in fine}
    (told,) = [one.sentence for one in fine if one.name == "classifier"]
    assert LEARNT in told
    if grades is not None:
        assert all(any(map(str.isdigit, o.sentence)) for o in fine if o.name != "policy")
        text = advice_text(facts)
        assert "Nothing to change." in text
        assert "800 tokens/s at 32.0 requests at once" in text
        assert "of 900 verified" in text


@pytest.mark.parametrize(
    ("facts", "name", "settings", "said"),
    [
        (FULL, "queue", {"--max-running-requests": "64"},
         ["16 requests wait while 48 run: no more than 48 may", "by the planner's costs"]),
        (replace(FULL, running=47.0, rates=FALLING), "queue", {}, ["add a replica"]),
        (replace(GATED, max_running=32, queued=16.0), "queue", None,
         ["c2t-plus measures no cost"]),
        (replace(HEALTHY, max_running=32, queued=16.0, requested_running=64), "queue", {},
         ["64 were asked for, and the server's memory holds 32", "--mem-fraction-static"]),
        (replace(HEALTHY, queued=8.0, kv_used=0.97), "KV cache", None, ["97% of the KV cache"]),
        (replace(HEALTHY, queued=8.0, retracted=3.0), "KV cache", None, ["40% of the KV cache"]),
        (TREES, "trees",
         {"--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "6"},
         ["84% of all rows are rejected"]),
        (replace(UNPACKED, unpacked_because="--c2t-verify static asks for it"), "packing", None,
         ["--c2t-verify static asks for it", "96 of 192 rows a step (50%)", "--c2t-verify auto"]),
        (replace(UNPACKED, unpacked_because="attention backend X does not say that it reads "
                 "packed rows"), "packing", None, ["attention backend X", "fa3 or flashinfer"]),
        (replace(GATED, grades=OFF), "classifier", None,
         ["promised that 97% survive, and 40% (+-3%) did", f"{LEARNT}, and was off by 1% there"]),
        (replace(GATED, grades=GOOD._replace(promised=0.4, survived=0.9)), "classifier", None,
         ["it ended 50% of the drafts"]),
        (replace(GATED, classifier={}, grades=OFF), "classifier", None, []),
        (replace(HEALTHY, grades=GOOD._replace(auc=0.52)), "classifier", None,
         ["AUC 0.52, where 0.50 is chance; c2t-plus learnt from", "and had 0.93 there"]),
        (of_steps(16, 0.6), "steps",  # of 0.6 ** depth the fifth is 8 percent, the sixth under 5
         {"--speculative-num-steps": "5", "--speculative-num-draft-tokens": "6"},
         ["65% of all rows are deeper than 5"]),
        (replace(HEALTHY, planned_layers=500,
                 accepted_at_least=dict.fromkeys(range(1, 6), 2000.0)), "steps",
         {"--speculative-num-steps": "7"}, []),
        (of_steps(4, 0.5), "policy", {"--c2t-policy": "default"}, []),
        (replace(FIXED, failures=100.0), "policy failures", None, ["failed in 100 of 100 steps"]),
    ],
)  # fmt: skip
def test_advice_names_the_cause_first(
    facts: Facts, name: str, settings: dict[str, str] | None, said: list[str]
) -> None:
    found = first(facts)
    assert found.name == name
    if settings is not None:
        assert settings.items() <= found.settings.items()
        assert settings or not found.settings
    for words in said:
        assert words in f"{found.sentence} {found.do} {found.gain.known_by}"


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (replace(HEALTHY, queued=8.0), None),  # neither the limit nor memory holds it up
        (replace(TREES, running=4.0, steps=800), None),
        (replace(TREES, policy="auto", plans=True, planned=100), "trees"),
        # Off by as much where it was trained, with evened classes.
        (replace(GATED, grades=GOOD._replace(promised=0.95), classifier={"heldout_ece": 0.15}),
         None),
        (replace(GATED, grades=Summary(ENOUGH - 1, 0.97, 0.4, 0.9, 0.05)), "classifier"),
        (replace(HEALTHY, grades=GOOD._replace(promised=0.3)), None),  # a plan calibrates
        (replace(of_steps(4, 0.5), running=4.0), "policy"),
    ],
)  # fmt: skip
def test_advice_does_not_blame_what_is_no_cause(facts: Facts, name: str | None) -> None:
    found, _ = judge(facts)
    assert found == [] if name is None else name not in [one.name for one in found]


def test_advice_of_an_older_server_has_an_unknown_pair() -> None:
    """And one whose policy reads no classifier has none."""
    older = replace(GATED, classifier={"heldout_ece": 0.01}, grades=None)
    (told,) = [one.sentence for one in judge(older)[1] if one.name == "classifier"]
    assert told == "it learnt from an unknown pair (of unknown names)"
    assert "classifier" not in [one.name for one in judge(FIXED)[1]]


def test_advice_gains_are_bounds_in_tokens() -> None:
    at_48 = np.interp(np.log2(48), [5, 6], [RATES[32], RATES[64]])
    gain = first(FULL).gain
    assert (gain.low, gain.high) == (0.0, pytest.approx((RATES[64] / at_48 - 1) * FULL.tokens))
    gain = first(replace(GATED, max_running=32, queued=16.0)).gain
    assert (gain.low, gain.high) == (0.0, pytest.approx(GATED.tokens / 2))
    # 96 rows of 0.2 ms of a step of 100 ms; never more than the share that they have.
    gain = first(replace(UNPACKED, unpacked_because="x")).gain
    assert gain.low < 800 * (1 / (1 - 0.192) - 1) < gain.high
    gain = first(replace(UNPACKED, unpacked_because="x", row_ms=(9.0, 5.0))).gain
    assert (gain.low, gain.high) == (pytest.approx(0.0, abs=1e-9), pytest.approx(800.0))
    gain = first(replace(GATED, grades=GOOD._replace(promised=0.4, survived=0.9))).gain
    assert gain.high == pytest.approx(1600 * 0.9 / 10)
    deep = replace(of_steps(16, 0.6), row_ms=(0.1, 0.0))
    deeper = sum(3200 * 0.6**d for d in range(6, 17)) / (deep.verifications + deep.correct)
    saved = 3200 * 11 / 100 * 0.1 / 100  # rows a step, of so many milliseconds, of 100
    assert first(deep).gain.low == pytest.approx(deep.tokens * ((1 - deeper) / (1 - saved) - 1))
    free = judge(replace(deep, row_ms=(0.0, 0.0)))  # what lies deeper is lost, and rows are free
    assert "steps" in [one.name for one in free[1]]


@given(
    st.floats(0, 200), st.floats(1, 64), st.floats(0, 1), st.floats(0, 1),
    st.sampled_from([HEALTHY, GATED, FIXED]), st.booleans(), st.integers(1, 8),
)  # fmt: skip
def test_advice_orders_causes_by_cost(
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


def test_advice_text_lists_each_flag() -> None:
    text = advice_text(replace(TREES, max_running=32, queued=64.0))
    assert "--speculative-eagle-topk 4 -> 1 (trees)" in text
    assert "--max-running-requests 32 -> 96 (queue)" in text
    assert "--speculative-num-steps 5 (stays)" in text


def test_useful_depth_is_the_deepest_that_survives_often() -> None:
    assert useful_depth(of_steps(16, 0.6)) == 5
    assert useful_depth(of_steps(4, 0.9)) == 4
    assert useful_depth(replace(FIXED, verifications=ENOUGH - 1)) is None

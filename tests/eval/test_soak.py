"""The soak's judgements: answers, memory, throughput, logs."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.soak.faults import ClassifierFile, Ending
from eval.soak.health import Drift, Growth, Idle, after_warm_up, alarms, drift, exceptions
from eval.soak.malformed import FATAL, HANGING, MALFORMED
from eval.soak.storm import Answers, Outcome, Storm, counted
from eval.soak.summary import Bounds, Findings, as_json, checks
from eval.soak.traffic import (
    Job,
    Output,
    difference,
    make_jobs,
    outputs_of,
    same,
    streamed_outputs,
)
from eval.soak.verdicts import Interruptions, Reply, judge, judge_malformed, own_of_stock

WHOLE = (Output("one two", "stop", (1, 2, 3)),)
JOB = Job("some", "/generate", {}, key="0")
LIMIT = 8.0


def reply(status: int = 200, outputs: Any = WHOLE, **how: Any) -> Reply:
    return Reply(status, started=10.0, ended=11.0, outputs=outputs, **how)


def verdict(
    answer: Reply, job: Job = JOB, expected: Any = WHOLE, spans: tuple[Any, ...] = ()
) -> str:
    return judge(job, answer, expected, Interruptions(LIMIT, list(spans)))


def test_a_deck_is_dealt_when_each_of_its_requests_went_out_once() -> None:
    never = Interruptions(LIMIT)
    storm = Storm("", [JOB], MALFORMED[:1], Answers(), never, random.Random(0), 9)
    dealt = []
    for _ in range(5):  # a deck has each job twice
        storm._draw()
        dealt.append(storm.dealt)
    assert dealt == [False, False, True, True, True]


def output(tokens: tuple[int, ...], finish: str) -> tuple[Output, ...]:
    return (Output("", finish, tokens),)


def test_an_equal_answer_is_right_and_any_other_whole_answer_is_wrong() -> None:
    assert verdict(reply()) == "right"
    for other in (
        Output("one two", "stop", (1, 2, 4)),
        Output("one two", "length", (1, 2, 3)),
        Output("one to", "stop", (1, 2, 3)),
        Output("one two", "stop", (1, 2)),
    ):
        assert verdict(reply(outputs=(other,))) == "wrong"
    assert verdict(reply(outputs=WHOLE * 2)) == "wrong"
    assert verdict(reply(outputs=())) == "wrong"


def test_log_probabilities_may_differ_by_rounding_only() -> None:
    expected = (replace(WHOLE[0], log_probs=(-1.0, -2.0)),)
    assert same((replace(WHOLE[0], log_probs=(-1.0, -2.0001)),), expected)
    assert not same((replace(WHOLE[0], log_probs=(-1.0, -2.01)),), expected)
    assert not same(WHOLE, expected)


def test_a_difference_is_told_by_its_place() -> None:
    got = (Output("one too", "length", (1, 2, 4)),)
    assert difference(got, WHOLE) == (
        "output 0: 3 instead of 3, length instead of stop, from 2 on (4,) instead of (3,)"
    )
    assert difference((), WHOLE) == "0 outputs instead of 1"


def test_a_cut_answer_must_be_a_beginning_and_somebody_must_have_cut_it() -> None:
    beginning = reply(outputs=output((1, 2), "abort"))
    assert verdict(beginning) == "unexpected"
    assert verdict(beginning, replace(JOB, end="abort")) == "cut"
    assert verdict(beginning, spans=((9.0, 10.5),)) == "cut"
    assert verdict(beginning, spans=((10.9, float("inf")),)) == "cut"
    assert verdict(beginning, spans=((1.0, 9.9), (11.1, 12.0))) == "unexpected"
    other = reply(outputs=output((1, 5), "abort"))
    assert verdict(other, replace(JOB, end="abort")) == "wrong"


def test_only_an_aborted_answer_may_run_past_its_end_and_by_one_verification() -> None:
    past = (1, 2, 3, 9, 9)
    assert verdict(reply(outputs=output(past, "abort")), replace(JOB, end="abort")) == "cut"
    assert verdict(reply(outputs=output(past, "stop"))) == "wrong"
    far = past + (9,) * 20
    assert verdict(reply(outputs=output(far, "abort")), replace(JOB, end="abort")) == "wrong"


def test_a_client_that_left_is_judged_by_what_it_had_seen() -> None:
    assert verdict(reply(0, output((1,), ""), left=True)) == "cut"
    assert verdict(reply(0, output((7,), ""), left=True)) == "wrong"
    assert verdict(reply(0, (), problem="no answer")) == "unexpected"


def test_the_time_limit_excuses_only_who_ran_as_long() -> None:
    told = {"problem": "Request running timeout reached."}
    assert verdict(reply(503, (), **told)) == "unexpected"
    assert verdict(Reply(503, 0.0, LIMIT + 1, **told)) == "timed out"
    assert verdict(Reply(503, 0.0, LIMIT + 1, problem="other")) == "unexpected"
    begun = (Output("", "abort", (1, 2), message="Request running timeout reached."),)
    assert verdict(Reply(200, 0.0, LIMIT + 1, begun)) == "timed out"
    assert verdict(reply(outputs=begun)) == "unexpected"
    silent = Reply(200, 0.0, LIMIT + 1, output((1, 2), "abort"))
    assert verdict(silent) == "unexpected"
    assert verdict(silent, replace(JOB, path="/v1/completions")) == "timed out"


@pytest.mark.parametrize("message", ["Aborted", "Abort in waiting queue"])
def test_past_the_time_limit_an_end_without_its_reason_is_the_limit(message: str) -> None:
    ended = (Output("", "abort", (1, 2), message=message),)
    assert verdict(Reply(200, 0.0, LIMIT + 1, ended)) == "timed out"
    assert verdict(reply(outputs=ended)) == "unexpected"
    other = (Output("", "abort", (1, 2), message="out of memory"),)
    assert verdict(Reply(200, 0.0, LIMIT + 1, other)) == "unexpected"


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_refusal_of_a_good_request_is_unexpected(status: int) -> None:
    assert verdict(reply(status, ())) == "unexpected"
    assert verdict(reply(status, ()), expected=None) == "unexpected"


def test_a_sampled_answer_must_only_be_whole() -> None:
    assert verdict(reply(outputs=output((5, 6), "length")), expected=None) == "right"
    assert verdict(reply(outputs=()), expected=None) == "wrong"
    assert verdict(reply(outputs=output((5,), "abort")), expected=None) == "unexpected"


@pytest.mark.parametrize(
    ("status", "stock", "expected"),
    [
        (400, 400, "refused"), (404, 200, "refused"), (422, 500, "refused"),
        (200, 400, "unexpected"), (500, 400, "unexpected"), (0, 400, "unexpected"),
        (200, 200, "as stock"), (500, 200, "unexpected"), (0, 500, "unexpected"),
        (200, 500, "unexpected"), (500, 500, "unexpected"),
        (400, None, "refused"), (200, None, "unexpected"), (0, None, "unexpected"),
    ],
)  # fmt: skip
def test_malformed_requests_are_answered_no_worse_than_by_stock(
    status: int, stock: int | None, expected: str
) -> None:
    assert judge_malformed(reply(status, ()), stock, Interruptions(LIMIT)) == expected


def test_what_stock_does_not_refuse_is_listed() -> None:
    stock = {"a": 400, "b": 200, "c": 500, "d": 0, "e": 405, "f": None}
    assert own_of_stock(stock) == {"b": 200, "c": 500, "d": 0, "f": None}


def test_streams_say_the_same_as_whole_answers() -> None:
    meta = {"finish_reason": {"type": "stop"}}
    row = {"text": "one two", "output_ids": [1, 2, 3], "meta_info": meta}
    early = {"text": "one", "output_ids": [1], "meta_info": {"finish_reason": None}}
    assert streamed_outputs("/generate", [early, row]) == outputs_of("/generate", row) == WHOLE
    pieces = [
        {"choices": [{"index": 0, "text": "one ", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "two", "finish_reason": "stop"}]},
        {"choices": []},
    ]
    whole = {"choices": [{"index": 0, "text": "one two", "finish_reason": "stop"}]}
    path = "/v1/completions"
    assert streamed_outputs(path, pieces) == outputs_of(path, whole)
    assert streamed_outputs(path, []) == (Output("", ""),)


def test_a_reply_of_another_form_is_an_error_not_an_answer() -> None:
    with pytest.raises(ValueError, match="another form"):
        outputs_of("/generate", {"detail": "nothing"})


def test_the_pool_is_the_same_for_a_seed_and_every_deterministic_request_has_its_own_key() -> None:
    jobs = make_jobs(3)
    assert jobs == make_jobs(3)
    assert jobs != make_jobs(4)
    keys = [job.key for job in jobs if job.key]
    assert len(set(keys)) == len(keys) > 70
    assert {job.kind for job in jobs if not job.key} == {"sampled"}
    assert {job.end for job in jobs} == {"answer", "abort", "leave"}


def test_malformed_requests_have_names_of_their_own() -> None:
    names = [case.name for case in (*MALFORMED, *FATAL, *HANGING)]
    assert sorted(Counter(names).values())[-1] == 1
    assert any(case.raw.count(b"NaN") for case in MALFORMED)
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(next(case.raw for case in MALFORMED if case.name == "JSON cut short"))


@given(slope=st.floats(-50, 50), noise=st.floats(0, 1), seed=st.integers(0, 99))
def test_growth_finds_a_line_and_its_interval_holds_it(
    slope: float, noise: float, seed: int
) -> None:
    minutes = np.arange(20.0)
    wobble = np.random.default_rng(seed).uniform(-noise, noise, 20)
    found = Growth.of(list(minutes), list(1000 + slope * minutes / 60 + wobble))
    assert found.low <= found.per_hour <= found.high
    assert abs(found.per_hour - slope) <= 60 * 2 * noise + 1e-6


def test_one_wild_reading_does_not_make_a_leak() -> None:
    readings = [1000.0] * 12
    readings[5] = 3000.0
    assert Growth.of(list(range(12)), readings).per_hour == 0


def test_warm_up_is_left_out_but_three_readings_stay() -> None:
    assert after_warm_up(list(range(8))) == list(range(2, 8))
    assert after_warm_up([1, 2, 3]) == [1, 2, 3]
    assert after_warm_up([1]) == [1]


def windows(loss: float, noise: float, seed: int = 0, count: int = 12) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    speeds = np.linspace(1, 1 - loss, count)
    return [list(speed * rng.lognormal(0, noise, 6)) for speed in speeds]


def test_drift_sees_a_server_that_slows_down_and_not_noise() -> None:
    slower = drift(windows(0.3, 0.02))
    assert slower.change == pytest.approx(-0.23, abs=0.03)
    assert slower.high < 0
    steady = drift(windows(0, 0.2))
    assert steady.low < 0 < steady.high
    assert steady.noise == pytest.approx(0.13, abs=0.04)


def test_too_few_windows_or_readings_are_refused() -> None:
    with pytest.raises(ValueError, match="3 windows"):
        drift([[1.0]] * 2)
    with pytest.raises(ValueError, match="3 measurements"):
        Growth.of([0, 1], [1, 1])


LOG = """\
[10:00:00] ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "a.py", line 3, in f
    g()
ValueError: 17 is odd
[10:00:01] fine
[10:00:02] Scheduler hit an exception: Traceback (most recent call last):
  File "b.py", line 3, in f

RuntimeError: pool memory leak detected! 3
[10:00:02] SIGQUIT received. signum=None
"""


def test_logs_are_read_for_exceptions_and_alarms() -> None:
    assert exceptions(LOG) == {
        "ValueError: # is odd": 1, "RuntimeError: pool memory leak detected! #": 1,
    }  # fmt: skip
    assert len(alarms(LOG)) == 2
    assert exceptions("all is well\n") == Counter()


GOOD = Findings(
    shape="chain",
    minutes=1.0,
    outcomes=[
        Outcome("some", "0", "right", 200, 0.1),
        Outcome("malformed", "bad", "refused", 400, 0.1),
        Outcome("malformed", "lenient", "as stock", 200, 0.1),
    ],
    kinds=frozenset({"some"}),
    stock={"bad": 400, "lenient": 200},
    meddling=Counter({("flush", "200"): 3}),
    meddling_unexpected=[],
    idle=[Idle(0, 0, 0, 0, 100)],
    memory_mib=[1000.0],
    growth=Growth(1.0, 0.0, 2.0),
    drift=Drift(0.01, -0.1, 0.1, 0.1),
    cpu_drift=Drift(0.01, -0.1, 0.1, 0.1),
    exceptions=Counter(),
    alarms=[],
    retracted=3,
    answers_at_the_end=True,
    ending=Ending("scheduler", 6.0, -9, (), True),
)

HARM: dict[str, dict[str, Any]] = {
    "outputs that differ": {"outcomes": [*GOOD.outcomes, Outcome("some", "0", "wrong", 200, 1)]},
    "answers nobody expected": {
        "outcomes": [*GOOD.outcomes, Outcome("some", "0", "unexpected", 500, 1)]
    },
    "malformed requests not answered": {
        "outcomes": [*GOOD.outcomes, Outcome("malformed", "bad", "as stock", 200, 1)]
    },
    "malformed kinds never sent": {"stock": {**GOOD.stock, "another": 400}},
    "kinds of requests never answered": {"kinds": frozenset({"some", "other"})},
    "control requests": {"meddling_unexpected": ["flush: 500"]},
    "requests retracted": {"retracted": 0},
    "idle moments": {"idle": [Idle(0, 0, 1, 0, 100)]},
    "exceptions": {"exceptions": Counter({"ValueError": 1})},
    "alarms": {"alarms": ["SIGQUIT"]},
    "answers at the end": {"answers_at_the_end": False},
    "memory growth": {"growth": Growth(100.0, 70.0, 130.0)},
    "throughput drift, by": {"cpu_drift": Drift(-0.1, -0.15, -0.05, 0.1)},
    "scheduler killed": {"ending": Ending("scheduler", 6.0, 0, (), True)},
}


def test_a_good_soak_passes_every_check() -> None:
    assert [check.name for check in checks(GOOD, Bounds()) if check.passed is not True] == []


@pytest.mark.parametrize("harm", HARM)
def test_each_harm_fails_its_own_check_and_no_other(harm: str) -> None:
    """Beyond its bound it is a failure, not undecided."""
    results = checks(replace(GOOD, **HARM[harm]), Bounds())
    ((name, passed),) = [(c.name, c.passed) for c in results if c.passed is not True]
    assert passed is False
    assert name.startswith(harm)


@pytest.mark.parametrize(
    ("ending", "clean"),
    [
        (Ending("x", 1, -9, (), True), True), (Ending("x", 1, None, (), True), False),
        (Ending("x", 1, -9, ("7",), True), False), (Ending("x", 1, -9, (), False), False),
    ],
)  # fmt: skip
def test_an_ending_is_clean_when_nothing_is_left(ending: Ending, clean: bool) -> None:
    assert ending.clean is clean


GROWTH, DRIFT = "memory growth after warm-up", "throughput drift"


@pytest.mark.parametrize(
    ("check", "of", "passed"),
    [
        (GROWTH, Growth(59.0, 40.0, 80.0), True), (GROWTH, Growth(70.0, 59.0, 90.0), None),
        (GROWTH, Growth(70.0, 61.0, 90.0), False), (GROWTH, None, None),
        (DRIFT, Drift(-0.04, -0.06, -0.01, 0.1), True),
        (DRIFT, Drift(-0.06, -0.2, 0.01, 0.1), None),
        (DRIFT, Drift(-0.06, -0.07, -0.01, 0.1), False),
    ],
)  # fmt: skip
def test_harm_is_what_surely_grows_by_60_mib_an_hour_or_loses_5_percent_of_its_speed(
    check: str, of: Growth | Drift | None, passed: bool | None
) -> None:
    """What cannot be told is neither passed nor failed."""
    findings = replace(GOOD, **{"growth" if check == GROWTH else "drift": of})
    assert {c.name: c.passed for c in checks(findings, Bounds())}[check] is passed


def test_the_summary_holds_every_check_and_is_json() -> None:
    results = checks(GOOD, Bounds())
    told = json.loads(json.dumps(as_json(GOOD, results, Bounds())))
    assert len(told["checks"]) == len(results)
    assert told["requests"] == counted(GOOD.outcomes)


def test_a_harmed_classifier_file_comes_back_as_it_was(tmp_path: Any) -> None:
    file = ClassifierFile.copied(tmp_path, "c2t")
    whole = file.path.read_bytes()
    with file.lost():
        assert list(tmp_path.glob("classifier*")) == []
    with file.corrupt():
        assert file.path.read_bytes() != whole
    assert file.path.read_bytes() == whole

"""The soak's verdicts and checks, without servers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.soak.__main__ import exceptions, growth
from eval.soak.clients import (
    Clients,
    Interruptions,
    Reference,
    Reply,
    judge,
    judge_malformed,
)
from eval.soak.faults import ClassifierFile
from eval.soak.malformed import FATAL, HANGING, MALFORMED
from eval.soak.pool import Job, Output, make_jobs, outputs_of, same

WHOLE = (Output("one two", "stop", (1, 2, 3)),)
JOB = Job("some", {}, key="0")
ABORTED = replace(JOB, end="abort")
LIMIT = 8.0


def reply(status: int = 200, outputs: Any = WHOLE, seconds: float = 1.0, **more: Any) -> Reply:
    return Reply(status, 10.0, 10.0 + seconds, outputs, **more)


def output(tokens: tuple[int, ...], finish: str, text: str = "") -> tuple[Output, ...]:
    return (Output(text, finish, tokens),)


CUT, OTHER = output((1, 2), "abort"), output((1, 5), "abort")
NOW = (10.9, float("inf"))


@pytest.mark.parametrize(
    ("answer", "job", "expected", "span", "verdict"),
    [
        (reply(), JOB, WHOLE, None, "right"),
        (reply(outputs=output((1, 2, 4), "stop")), JOB, WHOLE, None, "wrong"),
        (reply(outputs=(replace(WHOLE[0], finish="length"),)), JOB, WHOLE, None, "wrong"),
        (reply(outputs=(replace(WHOLE[0], text="one to"),)), JOB, WHOLE, None, "wrong"),
        (reply(outputs=output((1, 2), "stop")), JOB, WHOLE, None, "wrong"),
        (reply(outputs=WHOLE * 2), JOB, WHOLE, None, "wrong"),
        (reply(outputs=()), JOB, WHOLE, None, "wrong"),
        (reply(outputs=CUT), JOB, WHOLE, None, "unexpected"),
        (reply(outputs=CUT), ABORTED, WHOLE, None, "cut"),
        (reply(outputs=CUT), JOB, WHOLE, NOW, "cut"),
        (reply(outputs=CUT), JOB, WHOLE, (11.1, 12.0), "unexpected"),
        (reply(outputs=CUT, seconds=LIMIT), JOB, WHOLE, None, "cut"),
        (reply(outputs=OTHER), ABORTED, WHOLE, None, "wrong"),
        (reply(outputs=output((1, 2, 3, 9), "abort")), ABORTED, WHOLE, None, "cut"),
        (reply(outputs=output((1, 2, 3, *[9] * 20), "abort")), ABORTED, WHOLE, None, "wrong"),
        (reply(outputs=output((1, 2, 3, 9), "stop")), JOB, WHOLE, None, "wrong"),
        (reply(0, output((1,), ""), disconnected=True), JOB, WHOLE, None, "cut"),
        (reply(0, output((7,), ""), disconnected=True), JOB, WHOLE, None, "wrong"),
        (reply(0, (), problem="no answer"), JOB, WHOLE, None, "unexpected"),
        (reply(503, ()), JOB, WHOLE, None, "unexpected"),
        (reply(503, (), LIMIT), JOB, WHOLE, None, "cut"),
        (reply(500, (), LIMIT), JOB, WHOLE, None, "unexpected"),
        (reply(outputs=output((5, 6), "length")), JOB, None, None, "right"),
        (reply(outputs=()), JOB, None, None, "wrong"),
    ],
)
def test_soak_reply_gets_its_verdict(
    answer: Reply, job: Job, expected: Any, span: Any, verdict: str
) -> None:
    """A cut answer must begin as expected, and something must have interrupted it."""
    assert judge(job, answer, expected, Interruptions(LIMIT, [span] if span else [])) == verdict


ABORT = '"finish_reason":"abort"'


@pytest.mark.parametrize(
    ("answer", "may_be_served", "span", "verdict"),
    [
        (reply(400, ()), False, None, "refused"), (reply(422, ()), True, None, "refused"),
        (reply(200, ()), False, None, "unexpected"), (reply(200, ()), True, None, "served"),
        (reply(500, ()), True, None, "unexpected"), (reply(0, ()), True, None, "unexpected"),
        (reply(503, ()), True, None, "unexpected"), (reply(503, ()), True, NOW, "cut"),
        (reply(200, (), problem=ABORT), False, NOW, "cut"),
        (reply(200, (), problem=ABORT), False, None, "unexpected"),
        (reply(500, ()), False, NOW, "unexpected"),
    ],
)  # fmt: skip
def test_soak_malformed_request_is_refused_or_served_as_by_stock(
    answer: Reply, may_be_served: bool, span: Any, verdict: str
) -> None:
    """It may be aborted while it waits."""
    interruptions = Interruptions(LIMIT, [span] if span else [])
    assert judge_malformed(answer, may_be_served, interruptions) == verdict


def test_soak_log_probabilities_may_differ_by_rounding() -> None:
    expected = (replace(WHOLE[0], log_probs=(-1.0, -2.0)),)
    assert same((replace(WHOLE[0], log_probs=(-1.0, -2.0001)),), expected)
    assert not same((replace(WHOLE[0], log_probs=(-1.0, -2.01)),), expected)
    assert not same(WHOLE, expected)


def test_soak_reads_an_answer_and_a_list_of_them() -> None:
    row = {
        "text": "one two",
        "output_ids": [1, 2, 3],
        "meta_info": {"finish_reason": {"type": "stop"}},
    }
    assert outputs_of(row) == WHOLE
    assert outputs_of([row, row]) == WHOLE * 2
    early = {"text": "one", "output_ids": [1], "meta_info": {"finish_reason": None}}
    assert outputs_of(early) == output((1,), "", "one")
    with pytest.raises(ValueError, match="another form"):
        outputs_of({"detail": "nothing"})


def test_soak_pool_repeats_for_a_seed_and_holds_every_kind() -> None:
    jobs = make_jobs(3)
    assert jobs == make_jobs(3)
    assert jobs != make_jobs(4)
    keys = [job.key for job in jobs if job.key]
    assert len(set(keys)) == len(keys) > 70
    assert {job.kind for job in jobs if not job.key} == {"sampled"}
    assert {job.end for job in jobs} == {"answer", "abort", "disconnect"}


def test_soak_deck_holds_every_request() -> None:
    clients = Clients(
        "", [JOB], MALFORMED[:1], Reference({}), Interruptions(LIMIT), random.Random(0)
    )
    drawn = [clients._draw() for _ in range(3)]  # a deck holds each job twice
    assert (drawn.count(JOB), drawn.count(MALFORMED[0])) == (2, 1)
    clients._draw()
    assert clients.decks == 2


def test_soak_malformed_requests_have_different_names_and_bodies() -> None:
    every = (*MALFORMED, *FATAL, *HANGING)
    assert len({case.name for case in every}) == len(every) > 100
    assert len({(case.path, case.raw) for case in every}) >= len(every) - 1
    assert any(b"NaN" in case.raw for case in MALFORMED)


@pytest.mark.parametrize(
    ("slope", "noise", "passed"), [(0, 1, True), (50, 1, True), (90, 1, False), (120, 40, None)]
)
def test_soak_growth_fails_only_where_the_interval_is_above_the_bound(
    slope: float, noise: float, passed: bool | None
) -> None:
    hours = np.arange(16) / 16
    wobble = np.random.default_rng(0).uniform(-noise, noise, 16)
    assert growth(list(zip(hours, 1000 + slope * hours + wobble, strict=True))).passed is passed


def test_soak_growth_ignores_one_outlier_and_short_runs() -> None:
    readings = [(i / 12, 1000.0) for i in range(12)]
    assert growth(readings[:6]).passed is None
    readings[6] = (0.5, 3000.0)
    assert growth(readings).measured.startswith("+0 ")


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
"""


def test_soak_exceptions_are_the_last_lines_of_tracebacks() -> None:
    assert exceptions(LOG) == {
        "ValueError: # is odd": 1, "RuntimeError: pool memory leak detected! #": 1,
    }  # fmt: skip
    assert exceptions("all is well\n") == Counter()
    assert exceptions(f"{LOG}The server is fired up and ready to roll!\n") == Counter()


def test_soak_harmed_classifier_file_is_restored(tmp_path: Path) -> None:
    file = ClassifierFile.copied(tmp_path, "c2t")
    before = file.path.read_bytes()
    with file.lost():
        assert list(tmp_path.glob("classifier*")) == []
    with file.corrupt():
        assert file.path.read_bytes() != before
    assert file.path.read_bytes() == before

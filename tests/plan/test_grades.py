"""Confidences beside what became of the drafts."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_c2t.plan.grades import BINS, Grades, summary


def test_grades_count_drafts_by_confidence() -> None:
    grades = Grades()
    grades.observe(np.array([0.0, 0.51, 0.54, 1.0]), np.array([False, True, False, True]))
    grades.observe(np.array([0.52]), np.array([True]))
    told = grades.to_dict()
    middle = BINS // 2
    assert told["drafts"][0] == told["drafts"][-1] == 1
    assert told["drafts"][middle] == 3
    assert told["promised"][middle] == 0.51 + 0.54 + 0.52
    assert (told["survived"][0], told["survived"][middle], told["survived"][-1]) == (0, 2, 1)
    grades.reset()
    assert sum(grades.to_dict()["drafts"]) == 0


def test_grades_of_rows_have_their_own_errors() -> None:
    grades = Grades(2)
    confidence, survived = np.array([0.5, 0.5, 0.98]), np.array([True, False, False])
    grades.observe(confidence, survived, np.array([0, 0, 1]))
    assert grades.errors() == pytest.approx([0.0, 0.98])
    assert np.sum(grades.to_dict()["drafts"], axis=1).tolist() == [2, 1]


def test_grades_leave_out_what_is_no_probability() -> None:
    """A classifier may be broken, and must not end a server."""
    grades = Grades()
    grades.observe(np.array([np.nan, -1.0, 2.0, np.inf, 0.3]), np.array([True] * 5))
    assert sum(grades.to_dict()["drafts"]) == 1


def test_grades_summary_adds_schedulers() -> None:
    """Bins 0.1 and 0.9: of 10 and 30 drafts 4 and 26 survive; half of a bin's pairs are right."""
    one = {"drafts": [10.0, 10.0], "promised": [1.0, 9.0], "survived": [4.0, 6.0]}
    other = {"drafts": [0.0, 20.0], "promised": [0.0, 18.0], "survived": [0.0, 20.0]}
    grades = summary([one, other])
    assert grades is not None
    assert (grades.drafts, grades.promised, grades.survived) == (40.0, 0.7, 0.75)
    pairs = 26 * 6 + 0.5 * (26 * 4 + 4 * 6)
    assert grades.auc == pytest.approx(pairs / (30 * 10))
    assert summary([]) is None
    assert summary([{name: [0.0] for name in one}]) is None

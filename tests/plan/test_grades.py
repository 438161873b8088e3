"""Confidences beside what became of the drafts."""

from __future__ import annotations

import numpy as np

from sglang_c2t.plan.grades import BINS, Grades


def test_drafts_are_counted_by_confidence() -> None:
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


def test_what_is_no_probability_is_left_out() -> None:
    """A classifier may be broken, and must not end a server."""
    grades = Grades()
    grades.observe(np.array([np.nan, -1.0, 2.0, np.inf, 0.3]), np.array([True] * 5))
    assert sum(grades.to_dict()["drafts"]) == 1

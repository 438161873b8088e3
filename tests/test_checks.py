"""Values are judged by what a tensor holds, and refusals repeat them in one line."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.checks import (
    MAX_NUMBER,
    MAX_WHOLE,
    ConfigError,
    format_error,
    is_number,
    is_whole,
    parse_json,
    require,
    shown,
)
from tests.refusals import refused

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
WHOLE, FLOAT = st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | WHOLE | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@pytest.mark.parametrize("value", [0, -3, 0.5, MAX_NUMBER, -MAX_NUMBER, MAX_WHOLE])
def test_numbers_of_a_tensor_are_numbers(value: Any) -> None:
    assert is_number(value)


@pytest.mark.parametrize("value", [True, "1", None, [1], math.nan, math.inf, 1e39, 10**400, 1j])
def test_what_no_float32_tensor_holds_is_no_number(value: Any) -> None:
    assert not is_number(value)


def test_whole_numbers_have_bounds_and_are_no_truth_values() -> None:
    assert [is_whole(v, 1, 3) for v in (0, 1, 3, 4, 2.0, True, "2")] == [
        False, True, True, False, False, False, False,
    ]  # fmt: skip
    assert is_whole(MAX_WHOLE)
    assert not is_whole(MAX_WHOLE + 1)


def test_a_refusal_names_the_value_and_what_is_allowed() -> None:
    require(True, "c2t beta", "a number", "x")
    with pytest.raises(ConfigError, match=r"^c2t beta must be a number, got 'x'$"):
        require(False, "c2t beta", "a number", "x")


@given(st.text() | st.integers() | st.lists(st.text()))
def test_a_value_is_shown_in_one_short_line_of_ascii(value: Any) -> None:
    text = shown(value)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= 120


def test_a_value_that_has_no_text_is_shown_by_its_type() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a value of type list"
    assert shown(10**10_000) == "a value of type int"


def test_an_error_is_told_in_one_line() -> None:
    assert format_error(KeyError("a\nb")) == r"KeyError: 'a\nb'"
    assert format_error(ValueError("two\n  lines")) == "ValueError: two lines"
    assert format_error(ValueError()) == "ValueError"


@given(JSON)
def test_json_that_means_one_thing_is_read_as_python_reads_it(value: Any) -> None:
    assert parse_json(json.dumps(value), source="it") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not valid JSON"),
        ('{"a": 1, "a": 2}', "it: the key 'a' is given twice"),
        ('{"b": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        ("NaN", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("1e999", "too large a number"),
        ("1" * 5000, "it: "),
        ('"\\u0000"', "NUL or half a character"),
        ('{"\\ud800": 1}', "NUL or half a character"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 900 + "]" * 900, None),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
    ],
)
def test_json_that_means_two_things_or_none_is_refused(text: str, said: str | None) -> None:
    if said is None:
        parse_json(text, source="it")
        return
    with refused(said):
        parse_json(text, source="it")

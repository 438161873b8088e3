"""Suggestions for misspelt names."""

from __future__ import annotations

import pytest

from sglang_c2t.hints import did_you_mean, hints_for

KNOWN = ("beta", "policy", "policy_options")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("bta", "beta"), ("polcy", "policy"), ("policy_option", "policy_options"), ("BETA", "beta")],
)
def test_a_typo_is_answered_with_the_closest_name(typed: str, meant: str) -> None:
    assert did_you_mean(typed, KNOWN) == f"; did you mean {meant}?"


def test_a_word_that_is_close_to_nothing_gets_no_guess() -> None:
    assert did_you_mean("temperature", KNOWN) == ""
    assert did_you_mean("x", []) == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("unrecognized arguments: --bta=0.5", "; did you mean --beta?"),
        ("unrecognized arguments: --bta --polcy x", "; did you mean --beta?; did you mean --polic"),
        ("unrecognized arguments: beta", ""),  # a value without its flag
        ("argument command: invalid choice: 'recrod' (choose from a)", "; did you mean record?"),
        ("argument --beta: expected one argument", ""),
    ],
)
def test_what_argparse_does_not_know_gets_a_hint(message: str, said: str) -> None:
    hint = hints_for(message, ["--beta", "--policy", "record"])
    assert hint.startswith(said)
    assert bool(hint) == bool(said)

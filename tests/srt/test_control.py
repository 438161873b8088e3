"""What a POST to /c2t makes of the settings in force."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.srt.control import changed, settings

IN_FORCE = C2TConfig(policy="c2t-log", beta=0.4, classifier="mine.safetensors", max_verify_rows=64)


def test_what_is_not_named_stays() -> None:
    new = changed(IN_FORCE, {"beta": 0.7})
    assert settings(new) == {**settings(IN_FORCE), "beta": 0.7}
    assert new.max_verify_rows == 64


def test_a_policy_brings_its_own_threshold_and_classifier() -> None:
    new = changed(IN_FORCE, {"policy": "fixed", "policy_options": {"length": 3}})
    assert settings(new) == {
        "policy": "fixed",
        "beta": None,
        "classifier": "default",
        "policy_options": {"length": 3},
    }
    assert new.max_verify_rows == 64


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"beta": "0.5"}, "beta must be a number"),
        ({"max_verify_rows": 3}, "cannot change while the server runs; what can: policy, beta"),
        ({"record": "x"}, "cannot change"),
        ({}, "nothing to change"),
        ("c2t", "must be a JSON object, got str"),
        (None, "must be a JSON object, got NoneType"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(body: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        changed(IN_FORCE, body)

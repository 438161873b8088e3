"""What a ``--c2t`` server refuses of requests beyond what SGLang does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_c2t.srt import requests
from sglang_c2t.srt.requests import (
    check_request,
    check_sampling_params,
    opts_out,
    refuse_fatal,
    refuse_unreadable,
)

VOCABULARY = 100


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "active", lambda: object())


@pytest.mark.parametrize("ids", [None, [0], [99], [0, 99, 5]])
def test_prompts_of_the_models_tokens_pass(ids: Any) -> None:
    refuse_fatal(ids, VOCABULARY, SimpleNamespace(top_logprobs_num=VOCABULARY))
    refuse_fatal(ids, VOCABULARY, SimpleNamespace())


@pytest.mark.parametrize(
    ("ids", "top", "said"),
    [
        ([], 0, "no tokens"),
        ([1, 100], 0, "100 is no token of this model, which has 0 to 99"),
        ([-1, 5], None, "-1 is no token"),
        ([5], 101, "top_logprobs_num must be at most 100"),
    ],
)
def test_what_no_forward_survives_is_refused(ids: list[int], top: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_fatal(ids, VOCABULARY, SimpleNamespace(top_logprobs_num=top))


@pytest.mark.parametrize(("multimodal", "c2t"), [(True, True), (False, False)])
def test_placeholders_of_images_and_stock_servers_are_left_alone(
    multimodal: bool, c2t: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "active", lambda: object() if c2t else None)
    config = SimpleNamespace(is_multimodal=multimodal, vocab_size=VOCABULARY)
    called = []
    obj = SimpleNamespace(sampling_params={})
    check_request(
        lambda *args: called.append(args), SimpleNamespace(model_config=config), obj, [-200]
    )
    assert len(called) == 1


@pytest.mark.parametrize("params", [None, {}, {"stop_regex": "a+"}, {"stop_regex": ["a", "b"]}])
def test_readable_sampling_parameters_pass(params: Any) -> None:
    refuse_unreadable(params)


@pytest.mark.parametrize("params", [[{}], "hot", {"stop_regex": "("}, {"stop_regex": ["a", "["]}])
def test_what_stock_answers_with_500_is_refused(params: Any) -> None:
    with pytest.raises(ValueError, match=r"sampling_params must be an object|is no pattern"):
        refuse_unreadable(params)


def parameters(custom: Any) -> SimpleNamespace:
    return SimpleNamespace(custom_params=custom)


@pytest.mark.parametrize(
    ("custom", "out"), [(None, False), ({}, False), ({"c2t": True}, False), ({"c2t": False}, True)]
)
def test_who_says_false_opts_out(custom: Any, out: bool) -> None:
    check_sampling_params(None, parameters(custom))
    assert opts_out(SimpleNamespace(sampling_params=parameters(custom))) == out


@pytest.mark.parametrize("custom", ["x", [1], {"c2t": 0}, {"c2t": None}, {"c2t": "false"}])
def test_what_says_neither_is_refused(custom: Any) -> None:
    with pytest.raises(ValueError, match="custom_params"):
        check_sampling_params(None, parameters(custom))

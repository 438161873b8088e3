"""Requests that a ``--c2t`` server refuses and SGLang does not."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_c2t.srt.hooks import requests
from sglang_c2t.srt.hooks.requests import (
    MOST_SAMPLES,
    check_batch,
    check_message,
    check_request,
    check_sampling_params,
    constrained,
    opts_out,
    refuse_unreadable,
)
from tests.doubles import double

VOCABULARY = 100


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "active", lambda: object())


def manager(*, multimodal: bool = False) -> SimpleNamespace:
    config = SimpleNamespace(is_multimodal=multimodal, vocab_size=VOCABULARY)
    args = SimpleNamespace(enable_deterministic_inference=False)
    return SimpleNamespace(model_config=config, server_args=args)


def message(ids: list[int] | None = None, *, sampling: Any = None, **fields: Any) -> Any:
    """A request in the types of SGLang's HTTP process."""
    params = SamplingParams(**(sampling or {}))
    params.normalize(SimpleNamespace(encode=lambda text, **_: [1] * len(text)))
    values = {
        "input_text": "A",
        "input_ids": array("q", [5] if ids is None else ids),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": params,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
        "rid": "one",
    }
    return TokenizedGenerateReqInput(**{**values, **fields})


def sent(told: Any, *, multimodal: bool = False) -> Any:
    """The message, if the hook lets it through."""
    return check_message(lambda _: told, manager(multimodal=multimodal))


@pytest.mark.parametrize(
    "fields",
    [
        {"ids": [0], "top_logprobs_num": VOCABULARY, "token_ids_logprob": [0, 99]},
        {"ids": [0, 99, 5]},
        {"input_ids": None, "input_embeds": [[0.5]]},
        # What the scheduler judges itself.
        {"sampling": {"stop_token_ids": [10**9], "top_k": 2**31 - 1}},
        *({"logprob_start_len": start} for start in (-1, 0, 1, 2**31 - 1)),
    ],
)
def test_request_that_is_valid_is_sent(fields: dict[str, Any]) -> None:
    told = message(**fields)
    assert sent(told) is told
    assert sent(message([-200]), multimodal=True), "a placeholder of images"
    batch = GenerateReqInput(text=["A", "B"], rid=["x", "y"], sampling_params={"n": 1})
    check_batch(GenerateReqInput.normalize_batch_and_arguments, batch)
    assert batch.rid == ["x", "y"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ids": []}, "the prompt has no tokens"),
        ({"ids": [1, 100]}, r"a token of this model must be in \[0, 99\], got 100"),
        ({"ids": [-1, 5]}, r"a token of this model must be in \[0, 99\], got -1"),
        ({"top_logprobs_num": 101}, r"top_logprobs_num.* must be in \[0, 100\], got 101"),
        ({"top_logprobs_num": -1}, r"top_logprobs_num.* must be in \[0, 100\], got -1"),
        ({"logprob_start_len": -5}, r"logprob_start_len must be in \[-1, 2147483647\], got -5"),
        ({"token_ids_logprob": [100]}, "token_ids_logprob: a token of this model must be in"),
        ({"sampling": {"top_k": 2**31}}, r"top_k must be in \[1, 2147483647\], got 2147483648"),
        ({"sampling": {"top_k": -5}}, "top_k must be in"),
        ({"sampling": {"max_new_tokens": None, "min_new_tokens": 2**31}}, "min_new_tokens must"),
        ({"sampling": {"max_new_tokens": 2**31}}, "max_new_tokens must be in"),
        ({"sampling": {"stream_interval": 0}}, r"stream_interval must be in \[1, "),
        ({"sampling": {"temperature": 1e300}}, "temperature must be in"),
        ({"sampling": {"temperature": float("nan")}}, "temperature must be in .* got nan"),
        ({"sampling": {"repetition_penalty": 1e-300}}, "repetition_penalty must be in"),
        ({"sampling": {"logit_bias": {"5": 1e300}}}, "logit_bias must be in"),
        ({"sampling": {"logit_bias": {"5": float("nan")}}}, "logit_bias must be in"),
        (
            {"sampling": {"min_new_tokens": 1, "stop_token_ids": [100]}},
            "stop_token_ids with min_new_tokens must be in",
        ),
        # The scheduler reads by SGLang's own types, and a message that does not fit ends it.
        ({"top_logprobs_num": [1]}, "top_logprobs_num cannot be read: Expected `int`"),
        ({"return_logprob": "yes"}, "return_logprob cannot be read: Expected `bool`"),
        ({"priority": 1.5}, "priority cannot be read: Expected `int"),
        ({"logprob_start_len": 2**70}, "cannot be read"),
        ({"sampling": {"ignore_eos": "x"}}, "sampling_params cannot be read: Expected `bool`"),
        ({"sampling": {"custom_params": {"a": {"b": {}}}}}, "sampling_params cannot be read"),
        ({"sampling": {"stop_token_ids": [2**70]}}, "cannot be read"),
    ],
)
def test_request_that_would_end_a_server_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sent(message(**fields))


def test_request_checks_without_c2t_are_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "active", lambda: None)
    told = message([-200], logprob_start_len=-5)
    assert sent(told) is told
    called: list[Any] = []
    check_request(lambda *args: called.append(args), manager(), SimpleNamespace())
    check_batch(called.append, SimpleNamespace())
    assert len(called) == 2


@pytest.mark.parametrize(
    "error", [TypeError("x"), KeyError("x"), AttributeError("x"), OverflowError(), RecursionError()]
)
def test_request_that_sglang_cannot_read_is_refused(error: Exception) -> None:
    def stumble(*_: Any) -> None:
        raise error

    obj = SimpleNamespace(sampling_params={}, rid="one", is_single=True)
    for hook in (lambda: check_batch(stumble, obj), lambda: check_request(stumble, manager(), obj),
                 lambda: check_message(stumble, manager())):  # fmt: skip
        with pytest.raises(ValueError, match="the request cannot be read: " + type(error).__name__):
            hook()
    error = RuntimeError("out of memory")  # no fault of the request's
    with pytest.raises(RuntimeError, match="memory"):
        check_message(stumble, manager())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sampling_params": {"n": MOST_SAMPLES + 1}}, "n must be a whole number of samples, at"),
        ({"sampling_params": {"n": "two"}}, "n must be a whole number of samples"),
        ({"sampling_params": {"n": True}}, "n must be a whole number of samples"),
        ({"rid": ["x"]}, "rid must be a string for each request"),
        ({"rid": 7}, "rid must be a string for each request"),
        ({"text": ["A", "B"], "rid": ["x", ["y"]]}, "cannot be read|rid must be a string"),
        ({"text": ["A", "B"], "return_logprob": [True], "sampling_params": [7]}, "cannot be read"),
        ({"text": ["A", "B"], "return_logprob": [True]}, "cannot be read: IndexError"),
        ({"text": ["A", "B"], "sampling_params": [{}]}, "cannot be read: IndexError"),
    ],
)
def test_request_batch_that_cannot_be_made_is_refused(fields: dict[str, Any], said: str) -> None:
    obj = GenerateReqInput(**{"text": "A", "sampling_params": {}, **fields})
    with pytest.raises(ValueError, match=said):
        check_batch(GenerateReqInput.normalize_batch_and_arguments, obj)


@pytest.mark.parametrize("params", [[{}], "hot", {"stop_regex": "("}, {"stop_regex": ["a", "["]}])
def test_request_sampling_params_that_are_unreadable_are_refused(params: Any) -> None:
    for good in (None, {}, {"stop_regex": "a+"}, {"stop_regex": ["a", "b"]}):
        refuse_unreadable(good)
    with pytest.raises(ValueError, match=r"sampling_params must be an object|is no pattern"):
        refuse_unreadable(params)


def parameters(custom: Any) -> SimpleNamespace:
    return SimpleNamespace(custom_params=custom)


@pytest.mark.parametrize(
    ("custom", "out"), [(None, False), ({}, False), ({"c2t": True}, False), ({"c2t": False}, True)]
)
def test_request_opt_out_by_custom_params(custom: Any, out: bool) -> None:
    check_sampling_params(None, parameters(custom))
    assert opts_out(SimpleNamespace(sampling_params=parameters(custom))) == out


@pytest.mark.parametrize("custom", ["x", [1], {"c2t": 0}, {"c2t": None}, {"c2t": "false"}])
def test_request_opt_out_that_is_no_bool_is_refused(custom: Any) -> None:
    with pytest.raises(ValueError, match="custom_params"):
        check_sampling_params(None, parameters(custom))


# -- bodies ---------------------------------------------------------------------------------


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's chat endpoint as far as reading the body."""
    from fastapi import FastAPI, routing
    from fastapi.testclient import TestClient
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    app = FastAPI()

    def endpoint(request: Any) -> str:
        if request.user == "broken":
            raise TypeError("the server's own fault")
        return "read"

    endpoint.__annotations__["request"] = ChatCompletionRequest
    app.post("/chat")(endpoint)
    original = routing.solve_dependencies

    async def checked(*args: Any, **kwargs: Any) -> Any:
        return await requests.check_body(original, *args, **kwargs)

    monkeypatch.setattr(routing, "solve_dependencies", checked)
    return TestClient(app, raise_server_exceptions=False)


GOOD = {"model": "m", "messages": [{"role": "user", "content": "A"}]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *((body, 400) for body in ([1, "x"], 0, 1.5, "0", {**GOOD, "response_format": 3},
                                   {**GOOD, "response_format": [[1]]})),
        (GOOD, 200),
        ({**GOOD, "top_k": "x"}, 422),
        ({**GOOD, "user": "broken"}, 500),
    ],
)  # fmt: skip
def test_request_body_that_breaks_validators_is_400(chat: Any, body: Any, status: int) -> None:
    """One that is wrong stays wrong, and the server's own fault stays its own."""
    assert chat.post("/chat", json=body).status_code == status


@pytest.mark.parametrize(
    "sampling",
    [
        {"json_schema": "{}"}, {"regex": "a+"}, {"ebnf": "root ::= x"}, {"structural_tag": "{}"},
        {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"repetition_penalty": 1.1},
        {"min_new_tokens": 1}, {"logit_bias": {"7": 1.0}}, {"temperature": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_request_is_constrained_where_its_target_is_changed(sampling: dict[str, Any]) -> None:
    assert constrained(asking(**sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        {}, {"temperature": 0}, {"temperature": 1.0}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1},
        {"ignore_eos": True}, {"stop": "x"}, {"max_new_tokens": 0}, {"logit_bias": {}},
        {"custom_params": {"c2t": False}},
    ],
    ids=str,
)  # fmt: skip
def test_request_is_free_where_its_target_is_the_models_own(sampling: dict[str, Any]) -> None:
    assert not constrained(asking(**sampling))
    assert constrained(asking(processor="{}", **sampling))


def asking(processor: str | None = None, **sampling: Any) -> Any:
    """A request as the scheduler has it."""
    params = message(sampling=sampling).sampling_params
    return double("Req", sampling_params=params, custom_logit_processor=processor)

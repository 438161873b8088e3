"""Request fields of a ``--c2t`` server, and checks that SGLang lacks.

``custom_params = {"c2t": false}`` requests full drafts for a request.

Some requests pass SGLang's HTTP process, fail in the scheduler and end a stock server. Examples are
a prompt without tokens or with invalid ones, numbers that overflow the sampler's tensors, and
fields of the wrong type. One request must not end a server of many, so they are refused here in
two steps. The scheduler must be able to read every message, by SGLang's own types, and its numbers
must lie in :data:`RANGES`.

Requests that SGLang answers with 500 are refused as well, because a client's mistake is no server
error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang_c2t.checks import MAX_WHOLE, format_error, is_number, is_whole, shown
from sglang_c2t.config import active
from sglang_c2t.srt import compat
from sglang_c2t.srt.hooks.request_fields import refuse_unserved, telling_reserve

KEY = "c2t"

#: Most copies of a request: SGLang makes them in one go and serves no other request meanwhile.
MOST_SAMPLES = 1024

#: Sampling parameters that become tensors, and their limits. Values beyond these overflow the
#: tensor, or give zeros, infinities or nan in the sampler.
RANGES: dict[str, tuple[float, float]] = {
    "top_k": (1, MAX_WHOLE),
    "max_new_tokens": (0, MAX_WHOLE),
    "min_new_tokens": (0, MAX_WHOLE),
    "stream_interval": (1, MAX_WHOLE),
    "temperature": (0, 1e30),
    "repetition_penalty": (1e-6, 2),
}

#: Exceptions from reading a malformed request.
UNREADABLE = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)

#: Largest logit_bias of either sign. A logit that is infinite at a low temperature becomes nan.
MOST_BIAS = 1e30


def opts_out(req: Any) -> bool:
    """Whether one of SGLang's requests opted out of C2T."""
    return (req.sampling_params.custom_params or {}).get(KEY) is False


def asks(req: Any) -> bool:
    """Whether a request has penalties, a minimum length or a logit processor."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_new_tokens  # masks the end of an answer
        or req.custom_logit_processor
    )


def constrained(req: Any) -> bool:
    """Whether a request's target distribution differs from the model's own. A grammar, penalty,
    bias or processor changes it, and a temperature above 1 flattens it. Its outcomes are no labels
    for the confidence of other requests' drafts.
    """
    params = req.sampling_params
    return bool(
        asks(req)
        or params.json_schema
        or params.regex
        or params.ebnf
        or params.structural_tag
        or params.logit_bias
        or params.temperature > 1.0
    )


def check_sampling_params(_result: None, params: Any, *_args: Any) -> None:
    """AFTER hook on ``SamplingParams.verify``, whose ValueError is answered with 400."""
    if active() is None or params.custom_params is None:
        return
    if not isinstance(params.custom_params, Mapping):
        raise ValueError(f"custom_params must be an object, got {shown(params.custom_params)}")
    value = params.custom_params.get(KEY, True)
    if not isinstance(value, bool):
        raise ValueError(
            f"custom_params: {KEY} must be true or false, got {shown(value)}; false "
            "requests full drafts"
        )


def check_batch(original: Callable[..., None], obj: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND hook on ``GenerateReqInput.normalize_batch_and_arguments``; ValueError gives 400."""
    if active() is None:
        return original(obj, *args, **kwargs)
    with _reading():
        refuse_copies(obj.sampling_params)
        original(obj, *args, **kwargs)
        refuse_names(obj.rid, single=obj.is_single)
        if not obj.is_single:
            obj[len(obj.rid) - 1]  # fails where a list is too short, before anything is sent


def check_request(
    original: Callable[..., None], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND hook on ``TokenizerManager._validate_one_request``; ValueError gives 400."""
    if active() is None:
        return original(manager, obj, *args, **kwargs)
    if getattr(obj, "input_embeds", None) is not None:
        raise ValueError(
            "input_embeds cannot be served with --c2t: a draft is made behind the prompt's tokens; "
            "send text or input_ids"
        )
    with _reading(), telling_reserve(manager):
        refuse_unreadable(obj.sampling_params)
        return original(manager, obj, *args, **kwargs)


def check_message(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on ``TokenizerManager._create_tokenized_object``: checks the scheduler's
    message.
    """
    if active() is None:
        return original(manager, *args, **kwargs)
    with _reading():
        message = original(manager, *args, **kwargs)
        compat.require_readable(message)
    vocab_size = manager.model_config.vocab_size
    if not manager.model_config.is_multimodal:  # its placeholders are no tokens
        refuse_prompt(message.input_ids, vocab_size)
    refuse_sampling(message.sampling_params, vocab_size)
    refuse_logprobs(message, vocab_size)
    refuse_unserved(message, manager.server_args)
    return message


async def check_body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around FastAPI's ``solve_dependencies``, which parses an endpoint's body. SGLang's
    validators assume that the body and some fields are objects.
    """
    try:
        with _reading():
            return await original(*args, **kwargs)
    except ValueError as error:
        if not isinstance(error.__cause__, UNREADABLE):
            raise
        from fastapi import HTTPException

        raise HTTPException(400, str(error)) from error


@contextmanager
def _reading() -> Iterator[None]:
    """Turn errors inside into ValueError: SGLang only reads the request there."""
    try:
        yield
    except UNREADABLE as error:
        raise ValueError(f"the request cannot be read: {format_error(error)}") from error


def refuse_copies(sampling_params: Any) -> None:
    """Raise ValueError for more copies of a request than SGLang makes in a moment."""
    each = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    for params in each:
        count = params.get("n", 1) if isinstance(params, Mapping) else 1
        if count is not None and not is_whole(count, -MAX_WHOLE, MOST_SAMPLES):
            raise ValueError(
                f"n must be a whole number of samples, at most {MOST_SAMPLES}, got {shown(count)}"
            )


def refuse_names(rid: Any, *, single: bool) -> None:
    """Raise ValueError for invalid request ids, after SGLang gave each request its own."""
    each = [rid] if single else rid
    if not all(isinstance(name, str) for name in each):
        raise ValueError(f"rid must be a string for each request, got {shown(rid)}")


def refuse_unreadable(sampling_params: Any) -> None:
    """Raise ValueError for invalid sampling parameters, or an invalid pattern in them."""
    if sampling_params is None:
        return
    if not isinstance(sampling_params, Mapping):
        raise ValueError(f"sampling_params must be an object, got {shown(sampling_params)}")
    patterns = sampling_params.get("stop_regex")
    for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(
                f"stop_regex: {shown(pattern)} is no pattern: {format_error(error)}"
            ) from error


def refuse_prompt(input_ids: Any, vocab_size: int) -> None:
    """Raise ValueError for a prompt on which a text model's forward would fail. ``input_ids`` are
    its tokens, ``None`` for embeddings.
    """
    if input_ids is None:
        return
    if len(input_ids) == 0:
        raise ValueError("the prompt has no tokens: give at least one")
    for token in (min(input_ids), max(input_ids)):
        _require(token, 0, vocab_size - 1, "input_ids: a token of this model")


def refuse_sampling(params: Any, vocab_size: int) -> None:
    """Raise ValueError for numbers outside the sampler's limits."""
    for name, (least, most) in RANGES.items():
        value = getattr(params, name, None)
        if value is not None:
            _require(value, least, most, name)
    for bias in (params.logit_bias or {}).values():
        _require(bias, -MOST_BIAS, MOST_BIAS, "logit_bias")
    if params.min_new_tokens:  # they become columns of the penalties
        for token in params.stop_token_ids or ():
            _require(token, 0, vocab_size - 1, "stop_token_ids with min_new_tokens")


def refuse_logprobs(message: Any, vocab_size: int) -> None:
    """Raise ValueError for log-probabilities that cannot exist; embeddings have none."""
    start = getattr(message, "logprob_start_len", None)
    if start is not None:
        _require(start, -1, MAX_WHOLE, "logprob_start_len")
    top = getattr(message, "top_logprobs_num", None)
    if top is not None:
        _require(top, 0, vocab_size, "top_logprobs_num, of this model's vocabulary,")
    for token in getattr(message, "token_ids_logprob", None) or ():
        _require(token, 0, vocab_size - 1, "token_ids_logprob: a token of this model")


def _require(value: Any, least: float, most: float, what: str) -> None:
    if not (is_number(value) and least <= value <= most):
        raise ValueError(f"{what} must be in [{least}, {most}], got {shown(value)}")

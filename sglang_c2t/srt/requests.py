"""What a ``--c2t`` server reads in requests, and what it refuses that SGLang lets through.

``custom_params = {"c2t": false}`` has a request's drafts verified whole.

Some requests end a stock server: a prompt of no tokens, or of tokens that do not exist, fails in
the model's forward, and more top log-probabilities than there are tokens fail in the sampler. A
server that serves many should not die of one, so they are refused here, and so are two that it
answers with 500: a client's mistake should not look like the server's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sglang_c2t.config import active

KEY = "c2t"


def opts_out(req: Any) -> bool:
    """Whether one of SGLang's requests opted out."""
    return (req.sampling_params.custom_params or {}).get(KEY) is False


def check_sampling_params(_result: None, params: Any, *_args: Any) -> None:
    """AFTER hook on ``SamplingParams.verify``, whose ValueError is answered with 400."""
    if active() is None or params.custom_params is None:
        return
    if not isinstance(params.custom_params, Mapping):
        raise ValueError(f"custom_params must be an object, got {params.custom_params!r}")
    value = params.custom_params.get(KEY, True)
    if not isinstance(value, bool):
        raise ValueError(
            f"custom_params: {KEY} must be true or false, got {value!r}; false has this request's "
            "drafts verified whole"
        )


def check_request(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND hook on ``TokenizerManager._validate_one_request``; ValueErrors are answered 400."""
    if active() is not None:
        refuse_unreadable(obj.sampling_params)
    original(manager, obj, input_ids, *args, **kwargs)
    # Prompts of images and sounds hold placeholders that are no tokens.
    if active() is not None and not manager.model_config.is_multimodal:
        refuse_fatal(input_ids, manager.model_config.vocab_size, obj)


def refuse_unreadable(sampling_params: Any) -> None:
    """Raise ValueError for sampling parameters that are none, or hold a pattern that is none."""
    if sampling_params is None:
        return
    if not isinstance(sampling_params, Mapping):
        raise ValueError(f"sampling_params must be an object, got {sampling_params!r}")
    patterns = sampling_params.get("stop_regex")
    for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex: {pattern!r} is no pattern: {error}") from error


def refuse_fatal(input_ids: Any, vocab_size: int, obj: Any) -> None:
    """Raise ValueError for what no forward of a text model survives.

    ``input_ids`` are the prompt's tokens, ``None`` where it came as embeddings.
    """
    if input_ids is not None:
        if len(input_ids) == 0:
            raise ValueError("the prompt has no tokens: give at least one")
        for token in (min(input_ids), max(input_ids)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"input_ids: {token} is no token of this model, which has 0 to {vocab_size - 1}"
                )
    top = getattr(obj, "top_logprobs_num", None) or 0
    if top > vocab_size:
        raise ValueError(
            f"top_logprobs_num must be at most {vocab_size}, the model's vocabulary, got {top}"
        )

"""Requests that want their drafts verified whole: ``custom_params = {"c2t": false}``."""

from __future__ import annotations

from typing import Any

from sglang_c2t.config import active

KEY = "c2t"


def opts_out(req: Any) -> bool:
    """Whether one of SGLang's requests opted out."""
    return (req.sampling_params.custom_params or {}).get(KEY) is False


def check_sampling_params(_result: None, params: Any, *_args: Any) -> None:
    """AFTER hook on ``SamplingParams.verify``, whose ValueError is answered with 400."""
    if active() is None:
        return
    value = (params.custom_params or {}).get(KEY, True)
    if not isinstance(value, bool):
        raise ValueError(
            f"custom_params: {KEY} must be true or false, got {value!r}; false has this request's "
            "drafts verified whole"
        )

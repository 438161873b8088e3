"""Request fields whose answers would differ from those without speculation. Fields that can be
served as without drafts are; the server refuses the others with 400. ``guides/requests.md`` lists
them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_c2t.config import active
from sglang_c2t.srt import attach, compat


def refuse_unserved(message: Any, server_args: Any) -> None:
    """Raise ValueError for fields that a server with drafts cannot answer as one without."""
    if getattr(message, "return_hidden_states", False):
        raise ValueError(
            "return_hidden_states: --c2t does not give hidden states: the target keeps those that "
            "its draft reads, of other layers or none; ask a server without speculation"
        )
    deterministic = compat.argument(server_args, "enable_deterministic_inference")
    if message.sampling_params.min_p and deterministic:
        raise ValueError(
            "min_p: SGLang's sampler has none under --enable-deterministic-inference; use top_p"
        )


@contextmanager
def telling_reserve(manager: Any) -> Iterator[None]:
    """Add SGLang's reserve for drafts to its errors about limits, within the ``with`` block."""
    try:
        yield
    except ValueError as error:
        if not manager.num_reserved_tokens or "context length" not in str(error):
            raise
        raise ValueError(
            f"{error} {manager.num_reserved_tokens} of these tokens are kept free for drafts: a "
            "prompt and its answer may have so many fewer than the context length."
        ) from error


def count_reasoning(_result: None, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook on ``Req.update_finish_state``: limits reasoning tokens to the answer's tokens.
    SGLang counts all that a verification accepted, even after the end of the answer.
    """
    if active() is not None and req.finished():
        said = len(req.output_ids_through_stop)
        attach.write(req, reasoning_tokens=min(req.reasoning_tokens, said))


def drop_logprobs(
    _result: None, _manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """AFTER hook on ``TokenizerManager._calculate_spec_decoding_metrics``: an answer without tokens
    has no log-probabilities.
    """
    if active() is None or recv_obj.completion_tokens[i]:
        return
    if meta_info.get("output_token_logprobs"):
        meta_info["output_token_logprobs"] = []
        if "output_token_logprobs_length" in meta_info:
            meta_info["output_token_logprobs_length"] = 0

"""Draft extend over what was accepted, on a CPU, where the host may read it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from sglang_c2t.srt import attach

# B requests, N rows of a full draft


def extend_over_accepted(
    worker: Any,
    stock: Callable[..., None],
    batch: Any,
    batch_result: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend the draft over what was accepted.

    SGLang, the ``stock`` one, extends over N rows of every request, and reads the last accepted
    one of each. So does this with other ranks, which know of so many, and on a GPU.
    """
    accept_lens = batch_result.accept_lens
    as_many = worker.peers is not None or not accept_lens.is_cpu
    if batch.forward_mode.is_idle() or as_many:
        stock(batch, batch_result, *args, **kwargs)
        return
    longest = int(accept_lens.max())
    rows = partial(first_rows, requests=len(accept_lens), longest=longest)
    narrow, output = copy.copy(batch_result), copy.copy(batch_result.logits_output)
    attach.write(output, hidden_states=rows(output.hidden_states))
    attach.write(narrow, logits_output=output, next_token_ids=rows(narrow.next_token_ids))
    with (
        attach.swapped(worker, "speculative_num_draft_tokens", longest),
        attach.swapped(batch, "out_cache_loc", rows(batch.out_cache_loc)),
    ):
        stock(batch, narrow, *args, **kwargs)


def first_rows(values: Tensor | None, *, requests: int, longest: int) -> Tensor | None:
    """Of [B * N, ...] the ``longest`` first rows of each of B ``requests``."""
    if values is None:
        return None
    return values.unflatten(0, (requests, -1))[:, :longest].flatten(0, 1)

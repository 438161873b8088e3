"""Ragged verification: the target forwards only surviving rows, packed over the batch.

SGLang's verification works on [B, N] rows: sampling, grammar, log-probabilities and
bookkeeping all rely on it. So only the target's forward sees packed rows::

    EagleVerifyInput [B * N] --pack--> target forward [T] --unpack--> logits [B * N]

The attention backend learns the rows of each request from SGLang's own
``RaggedVerifyLayout`` (which DSPARK uses). Rows that were not forwarded come back as
zeros and are never read, because the cut chains end before them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_c2t.chain import packed_rows, unpack_rows
from sglang_c2t.config import ConfigError
from sglang_c2t.srt import compat

logger = logging.getLogger(__name__)

# B requests, N rows of a full chain, T surviving rows


class Packing(NamedTuple):
    """How packed rows map back: row i stands at ``rows[i]`` of ``num_rows`` = B * N."""

    rows: Tensor  # [T] int64
    num_rows: int


#: Verify lengths [B] of the verification in progress; None: full width.
_verify_lens: ContextVar[Tensor | None] = ContextVar("c2t_verify_lens", default=None)


def install(target_worker: Any) -> None:
    """Attach packing before, and unpacking after, the target's verify forward."""
    compat.wrap_global(compat.EAGLE_COMMON, "eagle_prepare_for_verify", _prepare_packed)
    forward = target_worker.forward_batch_generation

    def unpacking_forward(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        forward_batch = kwargs.get("forward_batch")
        packing = getattr(getattr(forward_batch, "spec_info", None), "c2t_packing", None)
        if packing is not None:
            _unpack_output(result.logits_output, packing)
        return result

    target_worker.forward_batch_generation = unpacking_forward


@contextmanager
def packing(verify_lens: Tensor | None) -> Iterator[None]:
    """Verify inside the block with these lengths [B]; ``None`` leaves full width."""
    token = _verify_lens.set(verify_lens)
    try:
        yield
    finally:
        _verify_lens.reset(token)


def decide(mode: str, target_runner: Any) -> bool:
    """Whether to pack, given ``--c2t-verify``.

    Backends are on an allow-list: one that ignores the layout would read wrong rows
    without an error. Raises :class:`ConfigError` when ragged was asked for by name.
    """
    reason = obstacle(target_runner)
    if mode == "static" or reason is None:
        return mode != "static"
    if mode == "ragged":
        raise ConfigError(f"--c2t-verify ragged cannot be served: {reason}")
    logger.warning("C2T: verifying full width (same output, no saving): %s", reason)
    return False


def obstacle(target_runner: Any, *, reads_rows: bool = False) -> str | None:
    """Why packed rows cannot be verified by this runner; ``None`` when they can.

    ``reads_rows``: the backend is known to read them, although it does not say so.
    """
    backend = target_runner.attn_backend
    if not reads_rows and not getattr(backend, "supports_ragged_verify_eager", False):
        return f"attention backend {type(backend).__name__} is not known to read packed rows"
    if compat.has_recurrent_state(target_runner.model_config):
        return "the target keeps recurrent state per verified row"
    return None


def _prepare_packed(
    original: Callable[..., Any],
    verify_input: Any,
    req_to_token_pool: Any,
    batch: Any,
    target_worker: Any,
) -> Any:
    """Around ``eagle_prepare_for_verify``: build the target's forward batch from packed rows."""
    verify_lens = _verify_lens.get()
    if verify_lens is None or batch.forward_mode.is_idle():
        return original(verify_input, req_to_token_pool, batch, target_worker)
    full_locs = verify_window(
        req_to_token_pool.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        verify_input.draft_token_num,
    ).flatten()
    packed = pack_verify_input(verify_input, verify_lens, full_locs)
    batch.spec_info = packed
    try:
        return original(packed, req_to_token_pool, batch, target_worker)
    finally:
        batch.spec_info = verify_input
        # Draft extend writes the whole window of each request, not the packed rows.
        batch.out_cache_loc = full_locs


def verify_window(req_to_token: Tensor, slots: Tensor, seq_lens: Tensor, width: int) -> Tensor:
    """[B, width] int64: KV locations of the positions behind each committed prefix."""
    positions = seq_lens[:, None] + torch.arange(width, device=seq_lens.device)
    return req_to_token[slots[:, None], positions].to(torch.int64)


def pack_verify_input(verify_input: Any, verify_lens: Tensor, full_locs: Tensor) -> Any:
    """A copy of the verify input [B * N] that holds only the surviving rows [T]."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    rows = packed_rows(verify_lens, verify_input.draft_token_num)
    packed = dataclasses.replace(
        verify_input,
        draft_token=verify_input.draft_token[rows],
        positions=verify_input.positions[rows],
        prepared_out_cache_loc=full_locs[rows],
        kv_loc_plan=None,  # it would bind the full window again
        custom_mask=None,  # a chain needs none, and the full mask has the wrong shape
    )
    # An attribute, not a field: dataclasses.replace() would drop it.
    packed.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=verify_lens, graph_num_tokens=rows.numel()
    )
    packed.c2t_packing = Packing(rows, num_rows=verify_input.draft_token.numel())
    return packed


def _unpack_output(output: Any, packing: Packing) -> None:
    """Scatter the target's [T, ...] outputs back to [B * N, ...], in place."""
    output.next_token_logits = unpack_rows(output.next_token_logits, *packing)
    if output.hidden_states is not None:
        output.hidden_states = unpack_rows(output.hidden_states, *packing)

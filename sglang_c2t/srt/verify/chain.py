"""Ragged verification of chains: the target forwards only surviving rows, packed.

SGLang's verification works on [B, N] rows: sampling, grammar, log-probabilities and
bookkeeping all rely on it. So only the target's forward sees packed rows::

    EagleVerifyInput [B * N] --pack--> target forward [T] --accept--> tokens [B * N]

The attention backend learns the rows of each request from SGLang's own
``RaggedVerifyLayout`` (which DSPARK uses). Acceptance looks at the packed logits (``accept.py``);
only where SGLang's own must read them, for log-probabilities and acceptance thresholds, are they
unpacked: rows that were not forwarded come back as zeros and are never read, because the cut
chains end before them. Hidden states always are, since draft extend reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from sglang.srt.speculative import eagle_worker_common
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.kernels.rows import scatter_rows
from sglang_c2t.srt import compat
from sglang_c2t.srt.verify import graphs
from sglang_c2t.srt.verify.accept import match_rows
from sglang_c2t.srt.verify.packing import Packing, packing_of

logger = logging.getLogger(__name__)

# B requests, N rows of a full chain, T rows of the target's forward


class _Verification(NamedTuple):
    """A verification in progress."""

    packing: Packing
    unpack_logits: bool
    """SGLang's own acceptance reads them."""


#: None: full width.
_verification: ContextVar[_Verification | None] = ContextVar("c2t_verification", default=None)


def install(target_worker: Any) -> None:
    """Attach packing before, and unpacking after, the target's verify forward."""
    compat.wrap_global(compat.EAGLE_COMMON, "eagle_prepare_for_verify", _prepare_packed)
    forward = target_worker.forward_batch_generation

    def unpacking_forward(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        packing = packing_of(kwargs.get("forward_batch"))
        if packing is not None and packing.parents is None:
            _unpack_output(result.logits_output, packing)
        return result

    target_worker.forward_batch_generation = unpacking_forward


@contextmanager
def packed(packing: Packing | None, batch: Any, *, own_acceptance: bool) -> Iterator[None]:
    """Verify chains inside the block with these rows; ``None`` leaves full width.

    ``own_acceptance``: tokens are accepted by sampling and matching, as thresholds of 1 ask for.
    """
    if packing is None:
        yield
        return
    unpack_logits = batch.return_logprob or not own_acceptance
    token = _verification.set(_Verification(packing, unpack_logits))
    stock = eagle_worker_common.eagle_sample
    sample = stock if unpack_logits else sample_and_match
    try:
        with compat.swapped(eagle_worker_common, "eagle_sample", sample):
            yield
    finally:
        _verification.reset(token)


def sample_and_match(
    verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None,
    *_args: Any, **_kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """In place of ``eagle_sample``, on packed logits. Rows are numbered as in [B * N]."""
    verification = _verification.get()
    assert verification is not None, "called outside of packed()"
    packing = verification.packing
    return match_rows(verify_input, packing, packing.rows, batch, logits_output, grammar_mask)


def decide(mode: str, target_runner: Any) -> bool:
    """Whether to pack, given ``--c2t-verify``, and prepare the target for it.

    Backends are on an allow-list: one that ignores the layout would read wrong rows
    without an error. Raises :class:`ConfigError` when ragged was asked for by name.
    """
    if mode == "static":
        return False
    reason = obstacle(target_runner)
    if reason is None:
        prepare(target_runner, trees=False, max_rows=None)
        return True
    if mode == "ragged":
        raise ConfigError(f"--c2t-verify ragged cannot be served: {reason}")
    logger.warning("C2T: verifying full width (same output, no saving): %s", reason)
    return False


def obstacle(target_runner: Any) -> str | None:
    """Why packed rows cannot be verified by this runner; ``None`` when they can."""
    backend = target_runner.attn_backend
    if compat.is_flashinfer(backend):
        from sglang_c2t.srt.verify import flashinfer as flashinfer_verify

        if (reason := flashinfer_verify.hindrance(backend)) is not None:
            return reason
    elif not compat.reads_packed_rows(backend):
        return f"attention backend {type(backend).__name__} is not known to read packed rows"
    if compat.gathers_rows(target_runner.server_args):
        return (
            "ranks exchange rows inside the model (--moe-a2a-backend, --moe-dense-tp-size), and "
            "agree on full width before it"
        )
    if compat.has_recurrent_state(target_runner.model_config):
        return "the target keeps recurrent state per verified row"
    return None


def prepare(target_runner: Any, *, trees: bool, max_rows: int | None) -> None:
    """Have the target's attention and CUDA graphs take packed rows."""
    if compat.is_flashinfer(target_runner.attn_backend):
        from sglang_c2t.srt.verify import flashinfer as flashinfer_verify

        flashinfer_verify.adopt(target_runner.attn_backend)
    if target_runner.device == "cuda":
        graphs.use_tiers(target_runner, trees=trees, max_rows=max_rows)


def _prepare_packed(
    original: Callable[..., Any],
    verify_input: Any,
    req_to_token_pool: Any,
    batch: Any,
    target_worker: Any,
) -> Any:
    """Around ``eagle_prepare_for_verify``: build the target's forward batch from packed rows."""
    verification = _verification.get()
    if verification is None or batch.forward_mode.is_idle():
        return original(verify_input, req_to_token_pool, batch, target_worker)
    packing = verification.packing
    forwarded, slots = packing.forwarded(verify_input, batch, target_worker.model_runner)
    batch.spec_info = forwarded
    try:
        with (
            compat.writing_rows(forwarded, slots),
            compat.rotating_rows(forwarded, verify_input.positions, packing.rotated),
        ):
            return original(forwarded, req_to_token_pool, batch, target_worker)
    finally:
        batch.spec_info = verify_input
        # Draft extend writes the whole window of each request, not the packed rows.
        batch.out_cache_loc = verify_window(
            req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            verify_input.draft_token_num,
        ).flatten()


def verify_window(req_to_token: Tensor, slots: Tensor, seq_lens: Tensor, width: int) -> Tensor:
    """[B, width] int64: KV locations of the positions behind each committed prefix.

    Those behind the context limit, where the table ends, are 0: SGLang's padding slot.
    """
    positions = seq_lens[:, None] + torch.arange(width, device=seq_lens.device)
    last = req_to_token.shape[1] - 1
    locations = req_to_token[slots[:, None], positions.clamp(max=last)]
    return locations.masked_fill(positions > last, 0).to(torch.int64)


def _unpack_output(output: Any, packing: Packing) -> None:
    """Scatter what is read as [B * N, ...] of the target's [T, ...] outputs, in place."""
    rows = packing.num_rows, packing.width
    verification = _verification.get()
    if verification is None or verification.unpack_logits:
        output.next_token_logits = scatter_rows(output.next_token_logits, *rows)
    if output.hidden_states is not None:
        output.hidden_states = scatter_rows(output.hidden_states, *rows)

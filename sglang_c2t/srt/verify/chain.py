"""Verification of chains, each cut where its gate or plan ended it.

Sampling, grammar and bookkeeping use [B * N] rows. Acceptance reads the packed logits
(``accept.py``). Logits are unpacked only for SGLang's own code: log-probabilities and acceptance
thresholds. Rows that were not forwarded become zeros, which SGLang never reads, because the cut
chains end before them. Hidden states are always unpacked, because draft extend reads them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Self

from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.kernels.rows import chain_links, scatter_rows
from sglang_c2t.srt import attach
from sglang_c2t.srt.verify import backends
from sglang_c2t.srt.verify.accept import match_rows
from sglang_c2t.srt.verify.packed import Accepted, PackedVerifyInput
from sglang_c2t.srt.verify.packing import Packing

logger = logging.getLogger(__name__)

# B requests, N rows of a full chain, T rows of the target's forward


@dataclasses.dataclass(kw_only=True)
class ChainVerifyInput(PackedVerifyInput):
    """A batch of chains."""

    verify_lens: Tensor
    """[B] int32 in [1, N]: rows of each chain, root included."""

    exact: bool = True
    """Whether drafts are accepted by sampling and matching, i.e. with thresholds of 1."""

    @classmethod
    def cut(
        cls, stock: EagleVerifyInput, lens: Tensor, links: Tensor | None = None, **own: Any
    ) -> Self:
        """Cut SGLang's verify input of full chains to ``lens`` [B] rows. Without their ``links``
        [B, N] it makes these and copies the lengths. The next step may overwrite ``lens`` while the
        scheduler still reads them.
        """
        if links is None:
            lens, links = chain_links(lens, stock.draft_token_num)
        return cls.of(stock, verify_lens=lens, retrieve_next_token=links, **own)

    @property
    def num_rows(self) -> Tensor:
        """[B] int32: verified rows of each request."""
        return self.verify_lens

    def accept(
        self,
        stock: Callable[..., Accepted],
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Accepted:
        """Replace ``eagle_sample``, the ``stock`` one, on packed outputs [T, ...]."""
        packing = self.packing
        assert packing is not None, "called outside of verifying()"
        if self.exact:
            paths = match_rows(self, packing, batch, logits_output, grammar_mask)
            accepted = paths.predict, paths.accept_lens, paths.accept_index
            if batch.return_logprob:
                _unpack(logits_output, "next_token_logits", packing)
        else:
            _unpack(logits_output, "next_token_logits", packing)
            accepted = stock(self, batch, logits_output, grammar_mask, *args, **kwargs)
        _unpack(logits_output, "hidden_states", packing)
        return accepted


def _unpack(output: Any, name: str, packing: Packing) -> None:
    """Scatter the target's [T, ...] to [B * N, ...], in place."""
    if (values := getattr(output, name)) is not None:
        rows = scatter_rows(values, packing.num_rows, packing.width)
        attach.write(output, **{name: rows})


def prepare_packing(mode: str, target_runner: Any) -> str | None:
    """Prepare the target for packed rows; returns why it cannot verify them, otherwise ``None``.
    ``mode`` is ``--c2t-verify``. Raises :class:`ConfigError` if it requires packed rows and the
    target cannot verify them.
    """
    if mode == "static":
        return backends.ASKED_FOR
    reason = backends.unsupported_reason(target_runner)
    if reason is None:
        backends.prepare(target_runner, trees=False, max_rows=None)
    else:
        _warn_of_full_width(mode, reason)
    return reason


def disable_packing(mode: str, target_runner: Any, reason: str) -> None:
    """Return to full drafts because of ``reason``. Raises as :func:`prepare_packing`."""
    _warn_of_full_width(mode, reason)
    backends.disable_packing(target_runner)


def _warn_of_full_width(mode: str, reason: str) -> None:
    if mode == "ragged":
        raise ConfigError(f"--c2t-verify ragged cannot be served: {reason}")
    logger.warning("C2T: verifying full width (same output, no saving): %s", reason)

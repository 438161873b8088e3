"""Logits of each verified row, changed by its request's parameters as in plain decoding. Batches
without such parameters skip this module: three host attributes decide (:func:`depends_on_outputs`).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.srt import attach
from sglang_c2t.srt.verify import processors
from sglang_c2t.srt.verify.packing import sent
from sglang_c2t.srt.verify.penalties import (
    OutputHistory,
    Penalties,
    Rows,
    prompt_lengths,
)

# B requests, N most rows of a request, R verified rows, V vocabulary


def depends_on_outputs(info: Any) -> bool:
    """Whether some request of a batch has penalties, a minimum length or a logit processor."""
    return (
        info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or info.has_custom_logit_processor
    )


class RowLogits:
    """A verification whose logits depend on the outputs of its requests so far.

    Args:
        verify_input: Ours, laid out.
        batch: SGLang's; its ``sampling_info`` is the forward's own copy.
        history: The outputs.
    """

    def __init__(self, verify_input: Any, batch: Any, history: OutputHistory) -> None:
        self._input, self._batch, self._history = verify_input, batch, history
        self._prompts = prompt_lengths(batch.reqs, batch.seq_lens.device)

    def change(self, logits_output: Any, grammar_mask: Any) -> None:
        """Apply all parameters to ``next_token_logits`` [T, V], in place and in plain decoding's
        order. It clears them in the batch, so that SGLang's acceptance does not apply them again.
        """
        batch, packing = self._batch, self._input.packing
        info, logits = batch.sampling_info, logits_output.next_token_logits
        if packing is not None:
            logits = logits[: packing.total]
        width, vocab = self._input.draft_token_num, logits.shape[1]
        roots = self._input.draft_token.view(-1, width)[:, 0]
        before = self._history.before(batch, roots, self._prompts, vocab)
        rows = Rows.of(self._input, self._prompts, vocab)
        Penalties.of(batch.reqs, vocab, logits.device).apply(logits, rows, before)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias[rows.request])
        if grammar_mask is not None:
            mask = grammar_mask.vocab_mask
            mask = mask if packing is None else mask[packing.rows]
            grammar_mask._replace(vocab_mask=mask).apply(logits)
        if info.has_custom_logit_processor:
            each = [width] * len(batch.reqs) if packing is None else packing.host_rows.tolist()
            outputs = functools.cache(lambda: _outputs(rows, before, vocab))
            processors.ask(logits, batch, each, outputs)
        attach.write(batch, sampling_info=_without(info))

    def keep(self, accepted: tuple[Tensor, ...]) -> None:
        """Store the accepted tokens for later steps."""
        self._history.keep(self._batch, self._prompts, accepted)


def recall(batch: Any) -> None:
    """Make the prefill of retracted requests count their earlier output. SGLang's penalizers start
    again with it. ``sampling_info`` is the forward's own copy.
    """
    info, said = batch.sampling_info, [req.output_ids for req in batch.reqs]
    if not depends_on_outputs(info) or not any(map(len, said)):
        return
    device, vocab, count = batch.seq_lens.device, info.vocab_size, len(said)
    longest = max(map(len, said))
    before = torch.tensor([[*each, *[vocab] * (longest - len(each))] for each in said])
    rows = Rows(
        torch.arange(count, device=device),
        torch.full((count, 1), vocab, device=device),
        sent(torch.tensor([len(each) for each in said]), device),
    )
    penalties, added = Penalties.of(batch.reqs, vocab, device), torch.zeros(count, vocab)
    added, scaling = added.to(device), None
    penalties._replace(repetition=None).apply(added, rows, before := sent(before, device))
    if penalties.repetition is not None:
        alone = Penalties(None, None, penalties.repetition, None, None)
        alone.apply(
            scaling := torch.full_like(added, -1.0), rows, before
        )  # the factor for negative logits
        scaling.neg_()
    attach.write(info, acc_additive_penalties=added, acc_scaling_penalties=scaling)


def _without(info: Any) -> Any:
    """Copy a batch's sampling parameters without those already applied to the logits."""
    done = copy.copy(info)
    attach.write(
        done,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
    )
    return done


def _outputs(rows: Rows, before: Tensor, vocab: int) -> list[list[int]]:
    """Return the output of each row. The host waits for the device; only processors read it."""
    each = torch.cat([before[rows.request], rows.tokens], dim=1).tolist()
    return [[token for token in row if token != vocab] for row in each]

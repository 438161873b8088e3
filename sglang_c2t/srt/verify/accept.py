"""Acceptance on packed rows: one target token per row, then the path of matching drafts.

SGLang accepts on [B * N, V] logits and, when sampling, on as many probabilities. Packed, only
the R verified rows are looked at, and only their R tokens are put where its kernel looks.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch import Tensor

from sglang_c2t.srt import compat
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.sampling import sample_rows

# B requests, N most rows of a request, R verified rows, S nodes of the longest path, V vocabulary


def match_rows(
    verify_input: Any,
    packing: Packing,
    at: Tensor,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place of ``eagle_sample``: (predict, accept_lens, accept_index).

    One token per row from the target's processed distribution, then the path along which
    drafts equal those tokens. Exact for chains and for every tree (see ``sampling.py``).

    Args:
        verify_input: SGLang's, with [B, N] links.
        packing: The rows that ``logits_output`` holds, of T >= R forwarded ones.
        at: [R] int64: the number by which ``retrieve_index`` calls each row.
        batch: SGLang's, with its sampling parameters.
        logits_output: ``next_token_logits`` [T, V].
        grammar_mask: SGLang's, of all B * N rows.

    Returns:
        predict: [B * N] int32, the target's token at each accepted row.
        accept_lens: [B] int32, accepted nodes, root (that is, bonus) included.
        accept_index: [B, S] int32, their rows, -1 behind the path.
    """
    logits = logits_output.next_token_logits[: packing.total]  # [R, V]
    info = batch.sampling_info
    sanitize_nan_logits(logits, "verify: target model logits")
    _apply_biases(logits, info, packing.request)
    if grammar_mask is not None:
        mask = grammar_mask._replace(vocab_mask=grammar_mask.vocab_mask[packing.rows])
        mask.apply(logits)
    if info.is_all_greedy:
        target = logits.argmax(dim=-1)
    else:
        positions = verify_input.positions[packing.rows]
        target = sample_rows(logits, info, packing.request, positions)

    batch_size, max_nodes = verify_input.retrieve_index.shape
    device = logits.device
    # The kernel wants B * N entries; links reach no others than the R that are filled in.
    target_predict = torch.zeros(batch_size * max_nodes, dtype=torch.int64, device=device)
    target_predict[at] = target
    predict, accept_index, num_correct = compat.verify_tree_greedy(
        predicts=torch.zeros(batch_size * max_nodes, dtype=torch.int32, device=device),
        accept_index=torch.full(
            (batch_size, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device
        ),
        accept_token_num=torch.empty(batch_size, dtype=torch.int32, device=device),
        candidates=verify_input.draft_token.view(batch_size, max_nodes),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=target_predict.view(batch_size, max_nodes),
        topk=verify_input.tree_topk,
    )
    return predict, num_correct + 1, accept_index


def _apply_biases(logits: Tensor, info: Any, request: Tensor) -> None:
    """Penalties and logit bias [B, V], on every row of their ``request`` [R], in place."""
    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties[request])
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, info.acc_scaling_penalties[request])
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[request])

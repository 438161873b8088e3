"""Acceptance on packed rows: one target token per row, then the path of matching drafts. SGLang
accepts on [B * N, V] logits and, when sampling, on as many probabilities. Here acceptance reads
only the R verified rows.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_c2t.kernels.accept import AcceptedPaths, accept_paths
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.sampling import sample_rows

# B requests, N most rows of a request, R verified rows, S nodes of the longest path, V vocabulary


def match_rows(
    verify_input: Any,
    packing: Packing,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
) -> AcceptedPaths:
    """Replace ``eagle_sample``: sample one target token per row, then follow the drafts that match.

    This is exact for chains and for every tree (see ``sampling.py``).

    Args:
        verify_input: SGLang's, of [B * N] rows.
        packing: The rows in ``logits_output``, R of T forwarded ones.
        batch: SGLang's. Its penalties and logit processors are already applied
            (:class:`~sglang_c2t.srt.verify.row_logits.RowLogits`).
        logits_output: ``next_token_logits`` [T, V].
        grammar_mask: SGLang's, of all B * N rows.
    """
    logits = logits_output.next_token_logits[: packing.total]  # [R, V]
    info = batch.sampling_info
    sanitize_nan_logits(logits, "verify: target model logits")
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[packing.request])
    if grammar_mask is not None:
        mask = grammar_mask._replace(vocab_mask=grammar_mask.vocab_mask[packing.rows])
        mask.apply(logits)
    if info.is_all_greedy:
        target = logits.argmax(dim=-1)
    else:
        positions = verify_input.positions[packing.rows]
        target = sample_rows(logits, info, packing.request, positions)

    layout, longest = packing.layout, verify_input.max_tree_depth
    # At full width the target also forwards rows after a chain's cut, which are not verified.
    num_rows = verify_input.num_rows if packing.parents is None else packing.num_rows
    return accept_paths(
        target,
        verify_input.draft_token,
        num_rows,
        layout.row_starts,
        layout.window,
        packing.parents,
        longest=longest,
        most=longest if verify_input.accepts_drafts else 1,
    )

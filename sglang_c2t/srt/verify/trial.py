"""The start-up trial: it verifies a few packed rows and compares them with full drafts.

A backend may claim to read ``RaggedVerifyLayout`` and do so for one model only, or only eagerly. A
row that attends to another request's keys raises no error; it gives another token. The trial has
three requests with different prefixes and draft lengths. SGLang's own verification of their full
drafts gives the expected logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.speculative.eagle_worker_common import (
    build_eagle_verify_input,
    eagle_prepare_for_verify,
)
from torch import Tensor

from sglang_c2t.srt import attach
from sglang_c2t.srt.data_parallel import peers
from sglang_c2t.srt.dummy import dummy_batch
from sglang_c2t.srt.tensor_parallel import host_broadcast_from_rank0
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.packed import prepare
from sglang_c2t.srt.verify.packing import Packing

# B requests, N rows of a full draft, V vocabulary

REQUESTS = 3

#: Largest difference of a row's logits, relative to their spread. Half precision rounds to 0.02;
#: a row that sees other keys differs completely.
APART = {torch.float32: 1e-2}
APART_ROUNDED = 0.1

#: Share of rows that may differ more: rounding can send a token to another expert.
EXCUSED = 0.25


def packed_output_mismatch_on_any_rank(worker: Any) -> str | None:
    """Run :func:`packed_output_mismatch` on ranks that forward together. All ranks return ``None``,
    or all return a reason. An error in the trial is a mismatch.
    """
    try:
        reason = packed_output_mismatch(worker)
    except Exception as error:
        reason = f"a packed batch failed with {type(error).__name__}: {error}"
    agree = host_broadcast_from_rank0() or (lambda numbers: numbers)
    (differs,) = agree([int(reason is not None)])
    if (others := peers()) is not None:
        (differs,) = max(others.of_all(differs))
    return (reason or "the rows of another rank differ") if differs else None


@torch.no_grad()
def packed_output_mismatch(worker: Any) -> str | None:
    """Return how logits of packed rows differ from those of full drafts; ``None`` if they agree.

    Args:
        worker: SGLang's speculative worker, after the capture of the target's CUDA graphs.
    """
    width = worker.speculative_num_draft_tokens
    runner = worker.target_worker.model_runner
    requests = min(REQUESTS, runner.max_running_requests)
    lengths = [1 + (width - b) % width for b in range(requests)]  # 1, N, N - 1
    rows = [1 + (width - 1 - b) % width for b in range(requests)]  # N, N - 1, N - 2
    with _places(worker, requests, 2 * width + 1) as slots:
        written = dummy_batch(worker, slots, [1] * requests)
        _logits(worker, written, _chains(worker, written, seed=0))  # the prefixes
        batch = dummy_batch(worker, slots, lengths)
        whole = _logits(worker, batch, _chains(worker, batch, seed=1))
        batch = dummy_batch(worker, slots, lengths)
        lens = torch.tensor(rows, dtype=torch.int32, device=worker.device)
        chains = ChainVerifyInput.cut(_chains(worker, batch, seed=1), lens)
        chains.packing = Packing(chains.verify_lens, width)
        packed = _logits(worker, batch, chains)[: sum(rows)]
    wanted = whole.view(requests, width, -1)
    return difference(packed, torch.cat([wanted[b, :n] for b, n in enumerate(rows)]), runner.dtype)


@contextmanager
def _places(worker: Any, requests: int, tokens: int) -> Iterator[list[int]]:
    """Yield rows of SGLang's request table with KV slots for ``tokens`` each; then free them."""
    table, allocator = worker.req_to_token_pool.req_to_token, worker.token_to_kv_pool_allocator
    span = -(-tokens // allocator.page_size) * allocator.page_size
    slots = list(range(1, requests + 1))
    places = allocator.alloc(requests * span)
    assert places is not None, f"no KV cache for {requests} requests of {span} tokens"
    for slot, mine in zip(slots, places.view(requests, span), strict=True):
        table[slot, :span] = mine
    try:
        yield slots
    finally:
        table[1 : requests + 1, :span] = 0
        allocator.clear()


def _chains(worker: Any, batch: Any, *, seed: int) -> Any:
    """Return SGLang's verify input of random full drafts, [B, N]."""
    width, draft = worker.speculative_num_draft_tokens, worker.draft_worker
    requests, vocab = len(batch.seq_lens), batch.model_config.vocab_size
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (requests, width), generator=random).to(worker.device)
    attach.write(batch.spec_info, bonus_tokens=tokens[:, 0].to(torch.int32))
    steps = torch.arange(width - 1, device=worker.device).repeat(requests, 1)
    parents = steps - 1 if width > 2 else steps[:, :0]
    return build_eagle_verify_input(
        batch, batch.spec_info, parents, steps, tokens[:, 1:].contiguous(), None,
        target_worker=worker.target_worker, topk=1, num_steps=width - 1, num_draft_tokens=width,
        tree_mask_mode=draft.tree_mask_mode, device=worker.device,
    )  # fmt: skip


def _logits(worker: Any, batch: Any, verify_input: Any) -> Tensor:
    """Return [T, V] logits of the target's forward."""
    target, pool = worker.target_worker, worker.req_to_token_pool
    attach.write(batch, spec_info=verify_input)
    if getattr(verify_input, "packing", None) is None:
        forward_batch, _ = eagle_prepare_for_verify(verify_input, pool, batch, target)
    else:
        forward_batch, _ = prepare(eagle_prepare_for_verify, verify_input, pool, batch, target)
    output = target.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True
    )
    logits: Tensor = output.logits_output.next_token_logits
    return logits.clone()  # the next replay overwrites a graph's


def difference(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> str | None:
    """Return how logits [R, V] of this ``dtype`` differ; ``None`` if only by rounding."""
    if found.shape != wanted.shape:
        return f"{tuple(found.shape)} logits come back where {tuple(wanted.shape)} should"
    found, wanted = found.float(), wanted.float()
    spread = (wanted - wanted.mean(dim=1, keepdim=True)).norm(dim=1).clamp(min=1e-6)
    apart = (found - wanted).norm(dim=1) / spread
    wrong = ~(apart <= APART.get(dtype, APART_ROUNDED))  # nan is wrong
    if int(wrong.sum()) <= EXCUSED * len(wrong):
        return None
    return (
        f"logits of {int(wrong.sum())} of {len(wrong)} packed rows differ from those of full "
        f"drafts by up to {float(apart.max()):.2g} of their spread"
    )

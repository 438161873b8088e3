"""What packed verification launches outside of graphs, compiled before a request waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_c2t.kernels.rows import accepted_paths, block_of, scatter_rows
from sglang_c2t.kernels.trees import cut_and_link
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt import compat
from sglang_c2t.srt.verify.packing import Packing, tiers_of
from sglang_c2t.tree import Trees


def warm_up(
    target_runner: Any,
    draft_runner: Any,
    width: int,
    max_requests: int,
    *,
    trees: bool,
    num_steps: int,
) -> None:
    """Compile what packed verification launches outside of graphs, for every batch size, before
    a request has to wait for it. The gate warms up itself.
    """
    device = target_runner.device
    for batch in one_of_each(max_requests):
        rows = torch.ones(batch, dtype=torch.int32, device=device)
        zeros = torch.zeros(batch * width, dtype=torch.int64, device=device)
        parents = zeros.view(batch, width) - 1 if trees else None
        packing = Packing(rows, width, parents=parents, num_steps=num_steps)
        requests = SimpleNamespace(
            req_to_token_pool=target_runner.req_to_token_pool,
            req_pool_indices=zeros[:batch],
            seq_lens=zeros[:batch],
        )
        packing.forwarded(
            SimpleNamespace(draft_token=zeros, positions=zeros, max_tree_depth=num_steps + 1),
            requests,
            target_runner,
        )
        _ = packing.rows, packing.words
        if trees:
            _warm_up_trees(packing, num_steps)
        if compat.is_flashinfer(target_runner.attn_backend):
            requests.batch_size, requests.seq_lens_cpu = batch, torch.zeros(batch)
            target_runner.attn_backend.eager_plan(requests, packing)
        if not trees:
            for columns, dtype in _unpacked_tables(target_runner, draft_runner):
                scatter_rows(torch.zeros((batch, columns), dtype=dtype, device=device), rows, width)
    if (tiers := tiers_of(target_runner)) is not None:
        _warm_up_layouts(tiers, device)


def _warm_up_trees(packing: Packing, num_steps: int) -> None:
    """What cuts them to what is verified, links them, and finds the accepted paths."""
    assert packing.parents is not None
    batch, width = packing.parents.shape
    # Links in one table, as drafted.
    parents, depth, source = packing.parents[:, :, None].repeat(1, 1, 3).unbind(dim=2)
    tokens = torch.zeros((batch, width), dtype=torch.int64, device=parents.device)
    roots = tokens[:, 0].contiguous()
    for chosen in (None, tokens[:, 1:] > 0):
        cut_and_link(Trees(tokens, parents, depth, roots, source), roots, chosen)
    path = torch.zeros((batch, num_steps + 1), dtype=torch.int32, device=parents.device)
    accepted_paths(path, path[:, 0].contiguous(), packing.rows, packing.window, width)


def one_of_each(most: int) -> list[int]:
    """Of the numbers from 1 to ``most`` one for each way in which Triton may compile for it: 1,
    multiples of 16 and all else are kernels of their own, and so are blocks of 1, 2, 4, ...
    """
    kinds: dict[tuple[int, bool, bool], int] = {}
    for number in range(1, most + 1):
        kinds.setdefault((block_of(number), number == 1, number % 16 == 0), number)
    return list(kinds.values())


def _unpacked_tables(target_runner: Any, draft_runner: Any) -> list[tuple[int, torch.dtype]]:
    """Columns and dtype of what :func:`scatter_rows` brings back: hidden states as wide as the
    draft reads them, and logits.
    """
    hidden = compat.target_hidden_width(draft_runner)
    return [
        (hidden, target_runner.dtype),
        (target_runner.model_config.vocab_size, torch.float32),
    ]


def _warm_up_layouts(tiers: Tiers, device: Any) -> None:
    """SGLang's kernels that pad a layout to the slots of its tier, at each replay."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    kinds: dict[tuple[object, ...], tuple[int, int, int]] = {}
    for rows in tiers.rows:
        slots = tiers.slots(rows)
        for batch in one_of_each(slots):
            kind = block_of(slots), *((n == 1, n % 16 == 0) for n in (batch, slots, rows))
            kinds.setdefault(kind, (batch, slots, rows))
    for batch, slots, rows in kinds.values():
        RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=torch.ones(batch, dtype=torch.int32, device=device), graph_num_tokens=rows
        ).padded_to_bucket(padded_bs=slots, cap=tiers.width)

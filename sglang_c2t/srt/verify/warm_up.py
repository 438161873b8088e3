"""Compiles the kernels that verification launches outside of graphs, before the first request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_c2t.kernels.accept import accept_paths
from sglang_c2t.kernels.layout import lay_out
from sglang_c2t.kernels.rows import block_of, block_of_batch, chain_links, scatter_rows
from sglang_c2t.kernels.trees import cut_and_link
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
    packed: bool = True,
) -> None:
    """Compile verification's kernels outside of graphs, for every batch size."""
    device = target_runner.device
    if not trees:
        chain_links(torch.ones(1, dtype=torch.int32, device=device), width)
        if not packed:
            return
    # Padded trees use the same code as packed ones, with all rows.
    for batch in sizes_per_triton_specialization(max_requests):
        rows = torch.ones(batch, dtype=torch.int32, device=device)
        zeros = torch.zeros(batch * width, dtype=torch.int64, device=device)
        parents = zeros.view(batch, width) - 1 if trees else None
        packing = Packing(rows, width, parents=parents, num_steps=num_steps)
        requests = SimpleNamespace(
            req_to_token_pool=target_runner.req_to_token_pool,
            req_pool_indices=zeros[:batch],
            seq_lens=zeros[:batch],
            can_run_decode_cuda_graph=True,
        )
        packing.forwarded(
            SimpleNamespace(draft_token=zeros, positions=zeros, max_tree_depth=num_steps + 1),
            requests,
            target_runner,
        )
        layout = packing.layout
        accept_paths(
            layout.rows, zeros, rows, layout.row_starts, layout.window, parents,
            longest=num_steps + 1, most=1,
        )  # fmt: skip
        _ = packing.words
        if trees:
            _warm_up_trees(packing)
        if hasattr(target_runner.attn_backend, "eager_plan"):  # FlashInfer's, adopted
            requests.batch_size, requests.seq_lens_cpu = batch, torch.zeros(batch)
            target_runner.attn_backend.eager_plan(requests, packing)
        if not trees:
            for columns, dtype in _unpacked_tables(target_runner, draft_runner):
                scatter_rows(torch.zeros((batch, columns), dtype=dtype, device=device), rows, width)
    _warm_up_layouts(target_runner, width, max(width, num_steps + 1))


def _warm_up_trees(packing: Packing) -> None:
    """Compile the kernels that cut and link trees."""
    assert packing.parents is not None
    batch, width = packing.parents.shape
    # Links in one table, as in a draft.
    parents, depth, source = packing.parents[:, :, None].repeat(1, 1, 3).unbind(dim=2)
    tokens = torch.zeros((batch, width), dtype=torch.int64, device=parents.device)
    roots = tokens[:, 0].contiguous()
    for chosen in (None, tokens[:, 1:] > 0):
        cut_and_link(Trees(tokens, parents, depth, roots, source), roots, chosen)


def sizes_per_triton_specialization(most: int) -> list[int]:
    """Return a number up to ``most`` for each variant that Triton compiles. It compiles 1,
    multiples of 16 and other numbers separately, and blocks of 1, 2, 4, ...
    """
    kinds: dict[tuple[int, bool, bool], int] = {}
    for number in range(1, most + 1):
        kinds.setdefault((block_of(number), number == 1, number % 16 == 0), number)
    return list(kinds.values())


def _unpacked_tables(target_runner: Any, draft_runner: Any) -> list[tuple[int, torch.dtype]]:
    """Return columns and dtype of the tables for :func:`scatter_rows`: hidden states and logits.
    Hidden states are as wide as the draft reads them.
    """
    hidden = compat.target_hidden_width(draft_runner)
    return [
        (hidden, target_runner.dtype),
        (target_runner.model_config.vocab_size, torch.float32),
    ]


def _warm_up_layouts(target_runner: Any, width: int, places: int) -> None:
    """Compile the layout kernel for the slots of each tier."""
    if (tiers := tiers_of(target_runner)) is None:
        return
    pool = target_runner.req_to_token_pool.req_to_token
    request = torch.zeros(1, dtype=torch.int64, device=pool.device)
    rows = request.repeat(width)
    for tier in {block_of_batch(tiers.slots(tier)): tier for tier in tiers.rows}.values():
        lay_out(
            request.int() + 1, rows, rows, pool, request, request,
            tokens=tier, slots=tiers.slots(tier), places=places,
        )  # fmt: skip

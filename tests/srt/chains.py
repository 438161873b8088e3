"""SGLang's verify inputs of chains, ours of trees."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor

from sglang_c2t.srt.verify import tree
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.tree import LinkedTrees, Trees
from tests import oracles


def full_chains(batch: int, width: int, **fields: Any) -> EagleVerifyInput:
    """Chains of ``width`` rows each, root included; what is neither given nor read is ``None``."""
    rows = torch.zeros(batch * width, dtype=torch.int64)
    links = torch.arange(1, width + 1).repeat(batch, 1)
    links[:, -1] = -1
    unread = dict.fromkeys(
        ("custom_mask", "retrieve_index", "retrieve_next_sibling", "retrieve_cum_len",
         "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu")
    )  # fmt: skip
    given = {"draft_token": rows, "positions": rows, "retrieve_next_token": links, **fields}
    return EagleVerifyInput(**unread, **given, spec_steps=width - 1, draft_token_num=width, topk=1)


def padded(rows: list[list[int]], pad: int, width: int) -> Tensor:
    """[B, N] of rows of different lengths."""
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])


def tree_input(
    parents: list[list[int]], tokens: list[list[int]], batch: Any, *, width: int, num_steps: int,
    packed: bool,
) -> Any:  # fmt: skip
    """Trees of ``parents`` and ``tokens`` per request, root first, in ``width`` nodes each."""
    depths = [[len(oracles.ancestors(p, n)) - 1 for n in range(len(p))] for p in parents]
    sources = [[-1, *range(len(p) - 1)] for p in parents]
    sizes = torch.tensor([len(p) for p in parents])
    trees = Trees(
        padded(tokens, 0, width), padded(parents, -1, width), padded(depths, 0, width), sizes,
        padded(sources, -1, width),
    )  # fmt: skip
    links: Any = {"parents": trees.parents, "num_steps": num_steps}
    full = Packing.full(len(parents), width, "cpu", **links)
    packing = Packing(sizes, width, **links) if packed else full
    return tree.build_verify_input(
        LinkedTrees.of(trees), batch, num_steps=num_steps, topk=3, packing=packing
    )

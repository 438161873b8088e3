"""Greedy verification: follow the tree's links while a child carries the target's token.

It does not know how the target's tokens were chosen: it matches argmax and sampled ones equally,
which makes "sample one token per row, then match" lossless. Source:
``sgl_kernel.verify_tree_greedy_cpu`` (CUDA twin: ``eagle.cuh`` of ``sgl_kernel``).
"""

from __future__ import annotations

import torch
from torch import Tensor


def verify_tree(
    predicts: Tensor,  # [rows] int32, written in place at the accepted rows
    accept_index: Tensor,  # [B, S] int32, -1 filled, written in place: accepted rows, root first
    accept_token_num: Tensor,  # [B] int32, written in place: accepted drafts, bonus excluded
    candidates: Tensor,  # [B, N] draft tokens, column 0 is the committed root
    retrive_index: Tensor,  # [B, N] row of every node in the verify batch
    retrive_next_token: Tensor,  # [B, N] first child or -1
    retrive_next_sibling: Tensor,  # [B, N] next sibling or -1
    target_predict: Tensor,  # [B, N] or [rows] the target's token after every row
) -> None:
    """Accept the longest path whose tokens are the target's own (``verify_tree_greedy_cpu``). Chain
    5 -> 7 -> 9, target tokens 7, 8, 1: the 7 is accepted, the 9 is not, and 8 is the bonus token.
    ``accept_index`` is ``[row 0, row 1, -1]``, ``accept_token_num`` is 1.
    """
    bs, max_accept = accept_index.shape
    request = torch.arange(bs, device=candidates.device)
    target = target_predict.reshape(-1)
    row = retrive_index[:, 0].clone()  # row of the last accepted node
    accept_index[:, 0] = row.to(accept_index.dtype)
    num_accept = torch.zeros(bs, dtype=torch.int64, device=candidates.device)
    node = retrive_next_token[:, 0] if max_accept > 1 else torch.full_like(row, -1)
    # every turn moves each request one link further, so N - 1 turns visit every node
    for _ in range(candidates.shape[1] - 1):
        alive = node >= 0
        if not bool(alive.any()):
            break
        at = node.clamp(min=0)
        wanted = target[row]
        hit = alive & (candidates[request, at] == wanted)
        miss = alive & ~hit
        hit_request = hit.nonzero().squeeze(1)
        predicts[row[hit_request]] = wanted[hit_request].to(predicts.dtype)
        row = torch.where(hit, retrive_index[request, at], row)
        num_accept += hit
        accept_index[hit_request, num_accept[hit_request]] = row[hit_request].to(accept_index.dtype)
        child = torch.where(num_accept < max_accept - 1, retrive_next_token[request, at], -1)
        node = torch.where(hit, child, torch.where(miss, retrive_next_sibling[request, at], -1))
    predicts[row] = target[row].to(predicts.dtype)
    accept_token_num.copy_(num_accept)

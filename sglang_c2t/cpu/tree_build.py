"""Links, positions and the mask of an EAGLE draft tree, from the draft's parent list.

It knows no tokens: the caller gathers those. Source: ``sgl_kernel.build_tree_kernel_efficient_cpu``
(SGLang's ``kernels/ops/speculative/spec_tree.py`` holds the Triton twin).

Shapes: B requests, N nodes per request (root included), K beam width, D draft steps. Node 0 is the
root. The parent of a flat candidate c is the root if c < K, otherwise ``parent_list[c // K]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_c2t.tree import child_links, visible_nodes

# Values of sglang.srt.speculative.eagle_utils.TreeMaskMode (0.5.17 .. 0.5.23)
FULL_MASK, QLEN_ONLY = 0, 1


def parent_positions(
    parent_list: Tensor,  # [B, K*(D-1)+1] int64, flat candidate index, -1 for the root
    selected_index: Tensor,  # [B, N-1] int64, ascending flat candidate index of nodes 1..N-1
    topk: int,
) -> Tensor:
    """[B, N] int64: node number of every node's parent; -1 for the root and for orphans. An orphan
    is a selected node whose parent was not selected. SGLang's kernels read out of bounds there;
    here it is never reached, which costs speed and not correctness.
    """
    bs = selected_index.shape[0]
    group = selected_index // topk
    from_root = group == 0
    if parent_list.shape[1] == 0:  # one draft step: all nodes are children of the root
        parent_candidate = torch.zeros_like(group)
    else:
        parent_candidate = parent_list.to(torch.int64).gather(1, group)
    same = selected_index.unsqueeze(1) == parent_candidate.unsqueeze(2)  # [B, node, parent]
    found = same.any(dim=2)
    position = same.to(torch.uint8).argmax(dim=2) + 1
    position = torch.where(from_root, 0, torch.where(found, position, -1))
    return torch.cat((position.new_full((bs, 1), -1), position), dim=1)


def build_tree(
    parent_list: Tensor,  # [B, K*(D-1)+1] int64
    selected_index: Tensor,  # [B, N-1] int64
    verified_seq_len: Tensor,  # [B] committed length, root excluded
    tree_mask: Tensor,  # bool, flat, written in place; layout by tree_mask_mode
    positions: Tensor,  # [B*N] int64, written in place
    retrive_index: Tensor,  # [B, N] int64, written in place: row of the verify batch
    retrive_next_token: Tensor,  # [B, N] int64, written in place: first child or -1
    retrive_next_sibling: Tensor,  # [B, N] int64, written in place: next sibling or -1
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill a verify batch's tree description (``build_tree_kernel_efficient_cpu``)."""
    bs = verified_seq_len.shape[0]
    parents = parent_positions(parent_list, selected_index, topk)
    next_token, next_sibling = child_links(parents)
    visible = visible_nodes(parents, depth)
    # Ancestors without the node itself; the root sees only itself, and orphans do not matter.
    node_depth = (visible.sum(dim=2) - 1).masked_fill_(parents < 0, 0)
    retrive_index.copy_(
        torch.arange(bs * draft_token_num, device=parents.device).view(bs, draft_token_num)
    )
    retrive_next_token.copy_(next_token)
    retrive_next_sibling.copy_(next_sibling)
    positions.copy_((verified_seq_len.to(torch.int64).unsqueeze(1) + node_depth).flatten())
    _write_mask(tree_mask, visible, verified_seq_len, tree_mask_mode)


def _write_mask(
    tree_mask: Tensor,  # bool, flat, in place
    visible: Tensor,  # [B, N, N] bool
    seq_lens: Tensor,  # [B]
    mode: int,
) -> None:
    if mode == QLEN_ONLY:
        tree_mask[: visible.numel()] = visible.flatten()
        return
    if mode != FULL_MASK:
        raise ValueError(
            f"tree_mask_mode {int(mode)} is not supplied on CPU; "
            "FULL_MASK (0) and QLEN_ONLY (1) are."
        )
    # one N x (L_b + N) block per request; only its last N columns are written
    bs, num_nodes, _ = visible.shape
    width = seq_lens.to(torch.int64) + num_nodes  # [B]
    block_start = (width * num_nodes).cumsum(0) - width * num_nodes
    node = torch.arange(num_nodes, device=visible.device)
    row_start = block_start.view(bs, 1) + node.view(1, -1) * width.view(bs, 1)
    cell = (row_start + (width - num_nodes).view(bs, 1)).unsqueeze(2) + node
    tree_mask[cell.flatten()] = visible.flatten()

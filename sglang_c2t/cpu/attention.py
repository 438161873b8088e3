"""Attention over paged KV rows for batches of requests with different lengths.

One function covers prefill, extend after a cached prefix, decode, draft decode and tree
verification. A request has `q_len` query rows, the last rows of its `kv_len` keys, and optionally a
mask among those rows. Requests are padded to a common shape within a group of similar ones. So no
loop runs per token or per request, and waste stays bounded. It knows nothing of SGLang, layers or
pools.

Shapes: T query rows of all requests packed, B requests, H query heads, G key heads,
R = H / G, D head size, S slots of the pool. Inside a group: b requests, Q rows, K keys.

    keys of a request:   [0 ........ kv_len - q_len)[kv_len - q_len ... kv_len)
    seen by query row i:  all                         up to row i, or where the mask allows
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

# A group may do this much more work than its requests need before it is split.
MAX_WASTE = 1.5
# Splitting costs a few dozen kernel launches, too much below this many scores.
SMALL_GROUP = 1 << 15


@dataclass
class Group:
    """Requests padded to Q rows and K keys; built once per forward, used by every layer."""

    kv_slots: Tensor  # [b*K] int64 pool slots, padding uses slot 0
    q_rows: Tensor | None  # [b*Q] int64 packed row of every padded row; None: already in order
    out_rows: Tensor | None  # [t] int64 packed rows of this group; None: all, in order
    out_cells: Tensor | None  # [t] int64 padded cell of each such row; None: all cells
    visible: Tensor  # [b, 1, Q, K] bool
    shape: tuple[int, int, int]  # (b, Q, K)
    positions: Tensor  # [b, Q] int64 position of every row in its request
    _biases: dict[tuple[int, torch.dtype, int | None], Tensor] = field(default_factory=dict)

    def bias(self, repeat: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """[b, 1, Q*repeat, K]: 0 where a row sees a key, -inf elsewhere; kept between layers."""
        key = (repeat, dtype, window)
        if key not in self._biases:
            visible = self.visible if window is None else self.visible & self._in_window(window)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            bias.masked_fill_(~visible, float("-inf"))
            self._biases[key] = bias.repeat_interleave(repeat, dim=2)
        return self._biases[key]

    def _in_window(self, window: int) -> Tensor:
        """[b, 1, Q, K] bool: keys at most `window` places before the row."""
        key = torch.arange(self.shape[2], device=self.positions.device)
        return (self.positions.unsqueeze(2) - key <= window).unsqueeze(1)


class Workspace:
    """Memory for gathered keys and values, kept between calls. Fresh tensors of this size come from
    mmap, and their page faults cost more than the copy.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def gather(self, name: str, source: Tensor, slots: Tensor) -> Tensor:
        """[n, ...] rows of `source` [S, ...]; valid until the next call with this name."""
        shape = (slots.shape[0], *source.shape[1:])
        numel = slots.shape[0] * source.shape[1:].numel()
        memory = self._memory.get((name, source.dtype))
        if memory is None or memory.numel() < numel:
            memory = torch.empty(numel + numel // 4, dtype=source.dtype, device=source.device)
            self._memory[(name, source.dtype)] = memory
        return torch.index_select(source, 0, slots, out=memory[:numel].view(shape))


@dataclass
class AttentionPlan:
    """Grouping of T packed query rows with their keys, for all layers."""

    groups: list[Group]
    num_rows: int  # T


def group_by_cost(q_lens: list[int], kv_lens: list[int]) -> list[list[int]]:
    """Group requests that have rows, so that padding wastes at most `MAX_WASTE`. Sorted by size, a
    group grows while its padded area stays near the sum of its areas. ``q [1, 1, 40], kv [20, 22,
    40]`` gives ``[[0, 1], [2]]`` (for large enough areas).
    """
    order = sorted(
        (i for i, q in enumerate(q_lens) if q > 0), key=lambda i: (q_lens[i], kv_lens[i], i)
    )
    groups: list[list[int]] = []
    max_q = max_kv = area = 0
    for i in order:
        next_q, next_kv = max(max_q, q_lens[i]), max(max_kv, kv_lens[i])
        next_area = area + q_lens[i] * kv_lens[i]
        padded = next_q * next_kv * ((len(groups[-1]) if groups else 0) + 1)
        if groups and padded <= max(SMALL_GROUP, MAX_WASTE * next_area):
            groups[-1].append(i)
            max_q, max_kv, area = next_q, next_kv, next_area
        else:
            groups.append([i])
            max_q, max_kv, area = q_lens[i], kv_lens[i], q_lens[i] * kv_lens[i]
    return [sorted(group) for group in groups]


def make_plan(
    req_to_token: Tensor,  # [rows, pool_len] slots
    req_rows: Tensor,  # [B] int64 row of every request
    q_lens: list[int],  # [B] query rows of every request, may be 0
    kv_lens: list[int],  # [B] keys of every request, query rows included
    tree_mask: Tensor | None = None,  # flat bool, q_len x own_len per request, packed
    own_lens: list[int] | None = None,  # [B] last keys that the mask covers; default: q_lens
    causal: bool = True,
) -> AttentionPlan:
    """Compute index lists and masks for `attend`. With `tree_mask`, a row sees all keys before its
    request's last `own_len`, and those of them that the mask allows. Without it, a row sees itself
    and the keys before it (`causal`), or all.
    """
    own_lens = q_lens if own_lens is None else own_lens
    cells = sum(q * own for q, own in zip(q_lens, own_lens, strict=True))
    if tree_mask is not None and tree_mask.numel() != cells:
        raise ValueError(
            f"the tree mask has {tree_mask.numel()} cells, the batch needs {cells} "
            f"(query rows {q_lens}, masked keys {own_lens})"
        )
    lengths = torch.tensor([q_lens, kv_lens, own_lens])  # [3, B]
    starts = F.pad(lengths[0].cumsum(0), (1, 0))
    mask_starts = F.pad((lengths[0] * lengths[2]).cumsum(0), (1, 0))
    members = group_by_cost(q_lens, kv_lens)
    groups = []
    for requests in members:
        who = torch.tensor(requests)
        seen = _Rows(lengths[:, who], mask_starts[who])
        visible = seen.visible(tree_mask, causal)
        slots = req_to_token[req_rows[who], : seen.num_keys].to(torch.int64)
        groups.append(_pad_group(seen, visible, slots, starts[who], len(members) == 1))
    return AttentionPlan(groups, int(starts[-1]))


class _Rows:
    """Positions of a group's padded rows and keys: b requests, Q rows, K keys."""

    def __init__(self, lengths: Tensor, mask_starts: Tensor) -> None:  # [3, b], [b]
        self.q_len, self.kv_len, self.own_len = lengths.unsqueeze(2)  # [b, 1] each
        self.mask_start = mask_starts.view(-1, 1, 1)
        self.num_rows, self.num_keys = int(lengths[0].max()), int(lengths[1].max())
        self.row = torch.arange(self.num_rows)
        self.key = torch.arange(self.num_keys)
        self.real_row = self.row < self.q_len  # [b, Q]
        self.real_key = self.key < self.kv_len  # [b, K]
        # position in the request; with a tree mask corrected to prefix + depth
        self.position = self.kv_len - self.q_len + self.row  # [b, Q]

    def visible(self, tree_mask: Tensor | None, causal: bool) -> Tensor:
        """[b, Q, K] bool."""
        seen = self.real_key.unsqueeze(1).expand(-1, self.num_rows, -1)
        if tree_mask is not None:
            seen = seen & self._by_mask(tree_mask)
        elif causal:
            seen = seen & (self.key <= self.position.unsqueeze(2))
        # A softmax over nothing is NaN: padded rows see key 0, and their result is dropped.
        return torch.where(self.real_row.unsqueeze(2), seen, self.key == 0)

    def _by_mask(self, tree_mask: Tensor) -> Tensor:
        """[b, Q, K] bool: the keys before the masked ones, and those that the mask allows."""
        own_len, q_len = self.own_len.unsqueeze(2), self.q_len.unsqueeze(2)
        column = self.key - (self.kv_len - self.own_len).unsqueeze(2)  # negative in the prefix
        row = self.row.view(1, -1, 1)
        own = (column >= 0) & (column < own_len) & (row < q_len)
        cell = self.mask_start + row * own_len + column
        allowed = own & tree_mask[torch.where(own, cell, 0)]
        self.position = self.kv_len - self.own_len + allowed.sum(dim=2) - 1  # ancestors and self
        return allowed | (column < 0)


def _pad_group(
    seen: _Rows,
    visible: Tensor,  # [b, Q, K] bool
    slots: Tensor,  # [b, K] int64, stale past a request's length
    starts: Tensor,  # [b] first packed row of every request
    alone: bool,
) -> Group:
    b = starts.shape[0]
    q_rows = out_rows = out_cells = None
    if not (alone and bool(seen.real_row.all())):
        q_rows = torch.where(seen.real_row, starts.unsqueeze(1) + seen.row, 0).flatten()
        out_cells = seen.real_row.flatten().nonzero().squeeze(1)
        out_rows = None if alone else q_rows[out_cells]
    return Group(
        kv_slots=torch.where(seen.real_key, slots, 0).flatten(),  # slot 0 is the padding slot
        q_rows=q_rows,
        out_rows=out_rows,
        out_cells=out_cells,
        visible=visible.unsqueeze(1),
        shape=(b, seen.num_rows, seen.num_keys),
        positions=seen.position,
    )


def draft_mask(batch_size: int, topk: int, num_steps: int, step: int) -> Tensor:
    """Flat [B, K, K*D] bool for draft decode: beam row t sees its own slots t*D .. t*D + step. This
    is SGLang's layout: KV stays in the beam row that wrote it, even after beams are re-sorted.
    Other layouts (exact ancestors) are other masks over the same K*D slots.
    """
    slot = torch.arange(topk * num_steps)
    beam = torch.arange(topk).unsqueeze(1)
    own = (slot // num_steps == beam) & (slot % num_steps <= step)  # [K, K*D]
    return own.flatten().repeat(batch_size)


def ancestor_mask(ancestor_rows: Tensor, num_slots: int) -> Tensor:
    """[B, K, K*D] bool for draft decode: beam t sees one slot per step, its ancestor's.
    ``ancestor_rows`` [B, K, i + 1] int64 is the beam row in which each ancestor was forwarded, its
    own last. Step j of row r is in slot r*D + j of the ``num_slots`` = K*D.
    """
    batch_size, topk, depth = ancestor_rows.shape
    num_steps = num_slots // topk
    slot = ancestor_rows * num_steps + torch.arange(depth, device=ancestor_rows.device)
    mask = torch.zeros((batch_size, topk, num_slots), dtype=torch.bool, device=slot.device)
    return mask.scatter(2, slot, True)


def attend(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [S, G, D]
    v_cache: Tensor,  # [S, G, Dv]
    plan: AttentionPlan,
    scaling: float,
    logit_cap: float = 0.0,
    window: int | None = None,
    workspace: Workspace | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """[T, H, Dv] attention of every packed row over its request's keys.

    Keys and values may have another dtype than the queries, which determine the computation's.
    `sinks` are scores of one more key per head that every row sees and whose value is 0 (gpt-oss).
    `logit_cap` c > 0 replaces a score s by c*tanh(s/c). `window` w lets a row see itself and the w
    keys before it. With a tree mask w must be at least the tree's depth, because the tree's keys
    are placed by slot, not by depth.
    """
    workspace = workspace or Workspace()
    scores = _Scores(scaling, logit_cap, window, sinks)
    if len(plan.groups) == 1:
        group = plan.groups[0]
        cells = _attend_group(q, k_cache, v_cache, group, scores, workspace)
        return cells if group.out_cells is None else cells.index_select(0, group.out_cells)
    out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[-1]))
    for group in plan.groups:
        cells = _attend_group(q, k_cache, v_cache, group, scores, workspace)
        assert group.out_rows is not None
        assert group.out_cells is not None
        out.index_copy_(0, group.out_rows, cells.index_select(0, group.out_cells))
    return out


@dataclass(frozen=True)
class _Scores:
    """Score parameters of a layer; see :func:`attend`."""

    scaling: float
    logit_cap: float
    window: int | None
    sinks: Tensor | None  # [H]


def _attend_group(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: Group, scores: _Scores, workspace: Workspace
) -> Tensor:
    """[b*Q, H, Dv]: one padded attention; query heads of a key head are in the row dimension."""
    b, num_q, num_k = group.shape
    heads, kv_heads, v_dim = q.shape[1], k_cache.shape[1], v_cache.shape[2]
    repeat = heads // kv_heads
    rows = q if group.q_rows is None else q.index_select(0, group.q_rows)
    rows = rows.view(b, num_q, kv_heads, repeat, -1).transpose(1, 2)
    rows = rows.reshape(b, kv_heads, num_q * repeat, -1)
    keys = workspace.gather("keys", k_cache, group.kv_slots)
    values = workspace.gather("values", v_cache, group.kv_slots)
    keys = keys.view(b, num_k, kv_heads, -1).transpose(1, 2).to(q.dtype)
    values = values.view(b, num_k, kv_heads, -1).transpose(1, 2).to(q.dtype)
    bias = group.bias(repeat, q.dtype, scores.window)
    if scores.logit_cap > 0 or scores.sinks is not None:
        out = _scored_attention(rows, keys, values, bias, scores)
    else:
        out = F.scaled_dot_product_attention(
            rows, keys, values, attn_mask=bias, scale=scores.scaling
        )
    out = out.view(b, kv_heads, num_q, repeat, v_dim).transpose(1, 2)
    return out.reshape(b * num_q, heads, v_dim)


def _scored_attention(
    rows: Tensor,  # [b, G, M, D], M = Q * R
    keys: Tensor,  # [b, G, K, D]
    values: Tensor,  # [b, G, K, Dv]
    bias: Tensor,  # [b, 1, M, K]
    how: _Scores,
) -> Tensor:
    """Compute soft-capped scores (Gemma 2) and sinks (gpt-oss), in float32 for any cache dtype."""
    b, kv_heads, num_rows, _ = rows.shape
    num_keys = keys.shape[2]
    scores = rows.float() @ keys.float().transpose(2, 3) * how.scaling
    if how.logit_cap > 0:
        scores = torch.tanh(scores / how.logit_cap) * how.logit_cap
    scores = scores + bias
    if how.sinks is not None:
        per_row = how.sinks.float().view(1, kv_heads, 1, -1)  # [1, G, 1, R]
        per_row = per_row.expand(b, -1, num_rows // per_row.shape[3], -1)
        scores = torch.cat((scores, per_row.reshape(b, kv_heads, num_rows, 1)), dim=3)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return (weights @ values.float()).to(rows.dtype)

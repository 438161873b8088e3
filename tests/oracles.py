"""Slow, obviously right versions: nested loops over plain numbers, one request at a time.

Nothing here is shared with the code under test. Shapes and words are those of the functions
they check.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

# -- networks -----------------------------------------------------------------------------


def logit(parameters: Iterable[Tensor], x: list[float]) -> float:
    """Weights and biases of one hidden layer of ReLUs, then of the output."""
    rows, biases, (out,), (out_bias,) = (p.double().tolist() for p in parameters)
    units = [
        max(sum(w * v for w, v in zip(row, x, strict=True)) + bias, 0.0)
        for row, bias in zip(rows, biases, strict=True)
    ]
    return sum(w * unit for w, unit in zip(out, units, strict=True)) + out_bias


# -- attention ----------------------------------------------------------------------------


def attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [S, G, D]
    v_cache: Tensor,  # [S, G, Dv]
    slots: list[list[int]],  # per request: the pool slot of every key
    q_lens: list[int],
    sees: list[list[list[bool]]],  # per request: [query row][key]
    scaling: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """[T, H, Dv] float64: softmax attention, one row, one head, one key at a time.

    A sink is the score of one more key, whose value is 0.
    """
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    out = torch.zeros(q.shape[0], heads, v_cache.shape[2], dtype=torch.float64)
    row = 0
    for request, q_len in enumerate(q_lens):
        for i in range(q_len):
            for h in range(heads):
                g = h // (heads // kv_heads)
                scores, values = [], []
                for place, slot in enumerate(slots[request]):
                    if not sees[request][i][place]:
                        continue
                    score = float(q[row, h].double() @ k_cache[slot, g].double()) * scaling
                    if logit_cap > 0:
                        score = logit_cap * math.tanh(score / logit_cap)
                    scores.append(score)
                    values.append(v_cache[slot, g].double())
                if sinks is not None:
                    scores.append(float(sinks[h]))
                    values.append(torch.zeros(v_cache.shape[2], dtype=torch.float64))
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                for weight, value in zip(weights, values, strict=True):
                    out[row, h] += value * (weight / sum(weights))
            row += 1
    return out


def causal_sees(q_len: int, kv_len: int, window: int | None = None) -> list[list[bool]]:
    """Row i sits at place kv_len - q_len + i and sees itself and (`window`) keys before it."""
    rows = []
    for i in range(q_len):
        place = kv_len - q_len + i
        rows.append([k <= place and (window is None or place - k <= window) for k in range(kv_len)])
    return rows


def masked_sees(mask: list[list[bool]], kv_len: int, window: int | None = None) -> list[list[bool]]:
    """All keys before the masked ones; of the last len(mask[0]) keys, what the mask says.

    A row sits at prefix + depth; `window` hides prefix keys further than that behind it.
    """
    rows = []
    for row in mask:
        prefix = kv_len - len(row)
        place = prefix + sum(row) - 1
        rows.append([window is None or place - k <= window for k in range(prefix)] + list(row))
    return rows


# -- trees --------------------------------------------------------------------------------


def tree_from_candidates(
    parent_list: list[int], selected: list[int], topk: int
) -> tuple[list[int], list[int], list[int], list[list[bool]]]:
    """(parents, first child, next sibling, visible) of nodes 0..len(selected); root is node 0."""
    num_nodes = len(selected) + 1
    parents = [-1]
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else selected.index(parent_list[group]) + 1)
    first, sibling = [-1] * num_nodes, [-1] * num_nodes
    for node in range(num_nodes):
        children = [c for c in range(num_nodes) if parents[c] == node]
        if children:
            first[node] = children[0]
        for left, right in itertools.pairwise(children):
            sibling[left] = right
    visible = []
    for node in range(num_nodes):
        path = ancestors(parents, node)
        visible.append([other in path for other in range(num_nodes)])
    return parents, first, sibling, visible


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node, its parent, and so on up to the root."""
    path = {node}
    while parents[node] >= 0:
        node = parents[node]
        path.add(node)
    return path


def accepted_path(parents: list[int], tokens: list[int], target: list[int]) -> list[int]:
    """Nodes accepted by greedy verification: from the root, the first child the target named."""
    path = [0]
    while True:
        wanted = target[path[-1]]
        children = [
            c for c in range(len(parents)) if parents[c] == path[-1] and tokens[c] == wanted
        ]
        if not children:
            return path
        path.append(children[0])


# -- hashing ------------------------------------------------------------------------------


def murmur3(seed: int, position: int, column: int) -> int:
    """MurmurHash3 (32 bits, seed 0) of the 16 bytes seed (8), position (4), column (4)."""
    mask = 0xFFFFFFFF
    data = (seed % 2**64).to_bytes(8, "little")
    data += (position & mask).to_bytes(4, "little") + (column & mask).to_bytes(4, "little")
    state = 0
    for at in range(0, 16, 4):
        key = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & mask
        key = (key << 15 | key >> 17) & mask
        state ^= key * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16

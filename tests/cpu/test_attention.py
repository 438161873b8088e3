"""`sglang_c2t.cpu.attention` against a loop over rows, heads and keys."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_c2t.cpu.attention import (
    Workspace,
    ancestor_mask,
    attend,
    draft_mask,
    group_by_cost,
    make_plan,
)
from tests import oracles

SLOTS, ROWS, WIDTH = 400, 9, 48
HEADS = st.sampled_from([(1, 1, 8), (4, 2, 8), (6, 1, 4), (4, 4, 16)])
USED = Workspace()


def _pool(seed: int, kv_heads: int, head_dim: int):
    """A pool whose every used slot differs, and rows of scattered slots (0 is padding)."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(SLOTS, kv_heads, head_dim, generator=generator)
    v = torch.randn(SLOTS, kv_heads, head_dim, generator=generator)
    order = torch.randperm(SLOTS - 1, generator=generator)[: (ROWS - 1) * WIDTH // 2] + 1
    req_to_token = torch.randint(1, SLOTS, (ROWS, WIDTH), generator=generator, dtype=torch.int32)
    flat = req_to_token.view(-1)
    flat[: order.shape[0]] = order.to(torch.int32)
    return k, v, req_to_token, generator


def _check(
    pool, rows, q, q_lens, kv_lens, sees, *mask, causal=True, window=None, logit_cap=0.0, sinks=None
):
    """With memory of its own and with that of all batches before; `mask` is `make_plan`'s.

    Whatever no request holds is nan, in the slot table's stale ends as in the pool.
    """
    k, v, req_to_token, _ = pool
    slots = [req_to_token[r, :n].tolist() for r, n in zip(rows, kv_lens, strict=True)]
    free = sorted(set(range(1, SLOTS)).difference(*slots))
    k[free], v[free] = torch.nan, torch.nan
    for row, length in zip(rows, kv_lens, strict=True):
        req_to_token[row, length:] = free[0]
    plan = make_plan(req_to_token, torch.tensor(rows), q_lens, kv_lens, *mask, causal=causal)
    wanted = oracles.attention(q, k, v, slots, q_lens, sees, 0.3, logit_cap, sinks)
    for workspace in (None, USED):
        out = attend(q, k, v, plan, 0.3, logit_cap, window, workspace, sinks)
        difference = (out.double() - wanted).abs().max().item()
        assert out.shape == wanted.shape
        assert difference < 2e-5, f"largest difference {difference}"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=6),
    heads=HEADS,
    seed=st.integers(0, 2**16),
    logit_cap=st.sampled_from([0.0, 1.5]),
    window=st.sampled_from([None, 0, 3]),
    causal=st.sampled_from([True, True, False]),
    has_sinks=st.booleans(),
    kept=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_extend_after_a_prefix_equals_the_loop(
    lengths, heads, seed, logit_cap, window, causal, has_sinks, kept
):
    """Any mix of prefills, extends, decodes (q_len 1) and idle requests (q_len 0).

    Encoder layers ask for causal=False, and then every row sees every key. Sinks take weight from
    all keys; keys may be kept in a narrower dtype than queries come in.
    """
    num_heads, kv_heads, head_dim = heads
    k, v, req_to_token, generator = _pool(seed, kv_heads, head_dim)
    pool = k.to(kept), v.to(kept), req_to_token, generator
    sinks = torch.randn(num_heads, generator=generator) if has_sinks else None
    q_lens = [q for q, _ in lengths]
    kv_lens = [q + prefix for q, prefix in lengths]
    rows = random.Random(seed).sample(range(1, ROWS), len(lengths))
    q = torch.randn(sum(q_lens), num_heads, head_dim, generator=generator)
    if sum(q_lens) == 0:
        assert make_plan(pool[2], torch.tensor(rows), q_lens, kv_lens).groups == []
        return
    sizes = list(zip(q_lens, kv_lens, strict=True))
    if causal:
        sees = [oracles.causal_sees(num_q, num_k, window) for num_q, num_k in sizes]
    else:
        window, sees = None, [[[True] * num_k] * num_q for num_q, num_k in sizes]
    how = {"window": window, "logit_cap": logit_cap, "sinks": sinks}
    _check(pool, rows, q, q_lens, kv_lens, sees, causal=causal, **how)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 15)), min_size=1, max_size=6),
    heads=HEADS,
    seed=st.integers(0, 2**16),
    window=st.sampled_from([None, 7, 9]),
)
def test_trees_of_different_size_and_shape_are_verified_in_one_batch(sizes, heads, seed, window):
    """Packed masks, one n x n block per request; node 0 is the root, a node sees its ancestors."""
    num_heads, kv_heads, head_dim = heads
    *_, generator = pool = _pool(seed, kv_heads, head_dim)
    rng = random.Random(seed)
    q_lens, masks = [], []
    for nodes, _ in sizes:
        parents = [-1] + [rng.randrange(n) for n in range(1, nodes)]
        paths = [oracles.ancestors(parents, node) for node in range(nodes)]
        q_lens.append(nodes)
        masks.append([[other in path for other in range(nodes)] for path in paths])
    kv_lens = [nodes + prefix for nodes, prefix in sizes]
    flat = torch.tensor([cell for mask in masks for row in mask for cell in row])
    rows = rng.sample(range(1, ROWS), len(sizes))
    q = torch.randn(sum(q_lens), num_heads, head_dim, generator=generator)
    sees = [oracles.masked_sees(m, n, window) for m, n in zip(masks, kv_lens, strict=True)]
    _check(pool, rows, q, q_lens, kv_lens, sees, flat, window=window)


@settings(max_examples=30, deadline=None)
@given(
    committed=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    topk=st.integers(1, 4),
    steps=st.integers(2, 4),
    seed=st.integers(0, 2**16),
)
def test_draft_beams_see_the_prefix_and_their_own_slots(committed, topk, steps, seed):
    """In draft step i, beam t of SGLang's layout reads slots L + t*D .. L + t*D + i."""
    *_, generator = pool = _pool(seed, 2, 8)
    rows = random.Random(seed).sample(range(1, ROWS), len(committed))
    q = torch.randn(len(committed) * topk, 4, 8, generator=generator)
    for step in range(steps - 1):
        own = topk * steps
        mask = draft_mask(len(committed), topk, steps, step)
        beams = [
            [t * steps <= slot <= t * steps + step for slot in range(own)] for t in range(topk)
        ]
        sees = [oracles.masked_sees(beams, n + own) for n in committed]
        kv_lens = [n + own for n in committed]
        q_lens, own_lens = [topk] * len(committed), [own] * len(committed)
        _check(pool, rows, q, q_lens, kv_lens, sees, mask, own_lens)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    topk=st.integers(1, 4),
    steps=st.integers(2, 5),
    seed=st.integers(0, 2**16),
)
def test_ancestor_mask_shows_each_beam_one_slot_per_step(batch, topk, steps, seed):
    """Step j of beam row r stands in slot r*D + j; rows name the ancestors, the own last."""
    rng = random.Random(seed)
    for depth in range(1, steps):
        rows = [
            [[rng.randrange(topk) for _ in range(depth)] for _ in range(topk)] for _ in range(batch)
        ]
        mask = ancestor_mask(torch.tensor(rows), topk * steps)
        assert mask.shape == (batch, topk, topk * steps)
        for b in range(batch):
            for t in range(topk):
                own = {row * steps + step for step, row in enumerate(rows[b][t])}
                assert mask[b, t].nonzero().flatten().tolist() == sorted(own)


def test_a_mask_of_the_wrong_size_is_refused():
    """A mask that does not fit the query lengths names both sizes."""
    with pytest.raises(ValueError, match="9 cells, the batch needs 5"):
        make_plan(torch.zeros(3, 9, dtype=torch.int32), torch.tensor([1, 2]), [1, 2], [4, 4],
                  torch.ones(9, dtype=torch.bool))  # fmt: skip


@given(lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2000)), max_size=40))
def test_groups_hold_every_request_with_work_once(lengths):
    """Groups partition the requests whose q_len is not 0, and padding stays bounded."""
    q_lens = [q for q, _ in lengths]
    kv_lens = [q + prefix for q, prefix in lengths]
    groups = group_by_cost(q_lens, kv_lens)
    assert sorted(i for g in groups for i in g) == [i for i, q in enumerate(q_lens) if q]
    for g in groups:
        padded = len(g) * max(q_lens[i] for i in g) * max(kv_lens[i] for i in g)
        work = sum(q_lens[i] * kv_lens[i] for i in g)
        assert padded <= max(1 << 15, 1.5 * work)

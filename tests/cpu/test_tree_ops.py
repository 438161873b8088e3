"""Tree building, verification and slot copies against loops over one request at a time."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_c2t.cpu import cache_locs, commit, kv_copy
from sglang_c2t.cpu.tree_build import FULL_MASK, QLEN_ONLY, build_tree
from sglang_c2t.cpu.tree_verify import verify_tree
from tests import oracles


def _grow(rng: random.Random, topk: int, depth: int, num_drafts: int):
    """(parent_list, selected): a random ancestor-closed draft in SGLang's encoding."""
    parent_list = [-1, *range(topk)]
    reachable = dict.fromkeys(range(topk), -1)  # candidate -> parent candidate
    frontier = list(range(topk))
    for step in range(1, depth):
        first = topk + (step - 1) * topk * topk
        grown = [first + i for i in range(topk * topk)]
        for candidate in grown:
            reachable[candidate] = frontier[(candidate - first) // topk]
        frontier = rng.sample(grown, topk)
        if step < depth - 1:
            parent_list += frontier
    # the last layer's own frontier is never expanded; its parents came with the layer before
    selected: list[int] = []
    while len(selected) < num_drafts:
        open_nodes = [c for c in reachable if c not in selected]
        ready = [c for c in open_nodes if reachable[c] in (-1, *selected)]
        selected.append(rng.choice(ready))
    return parent_list[: topk * (depth - 1) + 1], sorted(selected)


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(1, 4))


def _batch(seed, topk, depth, num_drafts, bs):
    most = topk + (depth - 1) * topk * topk
    num_drafts = min(num_drafts, most)
    rng = random.Random(seed)
    drafts = [_grow(rng, topk, depth, num_drafts) for _ in range(bs)]
    return rng, num_drafts, drafts


def _built(drafts, seq_lens, topk, depth, nodes, mode, mask):
    bs = len(drafts)
    links = torch.full((3, bs, nodes), -1, dtype=torch.long)
    positions = torch.empty(bs * nodes, dtype=torch.long)
    parent_list = torch.tensor([p for p, _ in drafts])
    if depth == 1:
        parent_list = torch.empty(bs, 0, dtype=torch.long)
    build_tree(
        parent_list, torch.tensor([s for _, s in drafts]), torch.tensor(seq_lens), mask,
        positions, *links, topk, depth, nodes, mode,
    )  # fmt: skip
    return links, positions.view(bs, nodes)


@settings(max_examples=80, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**16))
def test_links_positions_and_mask_equal_the_oracle(shape, seed):
    """Chains (topk 1), single-step and full trees, several requests of different shape."""
    topk, depth, num_drafts, bs = shape
    rng, num_drafts, drafts = _batch(seed, topk, depth, num_drafts, bs)
    nodes = num_drafts + 1
    seq_lens = [rng.randrange(1, 30) for _ in range(bs)]
    mask = torch.ones(bs * nodes * nodes, dtype=torch.bool)
    (index, child, sibling), positions = _built(
        drafts, seq_lens, topk, depth, nodes, QLEN_ONLY, mask
    )
    full = torch.ones(sum((n + nodes) * nodes for n in seq_lens), dtype=torch.bool)
    _built(drafts, seq_lens, topk, depth, nodes, FULL_MASK, full)
    start = 0
    for b, (parent_list, selected) in enumerate(drafts):
        parents, first, siblings, visible = oracles.tree_from_candidates(
            parent_list, selected, topk
        )
        assert index[b].tolist() == [b * nodes + i for i in range(nodes)]
        assert child[b].tolist() == first
        assert sibling[b].tolist() == siblings
        depths = [len(oracles.ancestors(parents, n)) - 1 for n in range(nodes)]
        assert positions[b].tolist() == [seq_lens[b] + d for d in depths]
        assert mask.view(bs, nodes, nodes)[b].tolist() == visible
        width = seq_lens[b] + nodes
        block = full[start : start + nodes * width].view(nodes, width)
        assert block[:, : seq_lens[b]].all()
        assert block[:, seq_lens[b] :].tolist() == visible
        start += nodes * width


def test_an_orphan_is_unreachable_and_harmless():
    """Candidate 9 hangs from candidate 1, which was not selected: no link leads to it."""
    drafts = [([-1, 0, 1, 2], [0, 9])]
    mask = torch.ones(9, dtype=torch.bool)
    (_, child, sibling), _ = _built(drafts, [5], 3, 2, 3, QLEN_ONLY, mask)
    assert child.tolist() == [[1, -1, -1]]
    assert sibling.tolist() == [[-1, -1, -1]]
    assert mask.view(3, 3)[2].tolist() == [True, False, True]


@settings(max_examples=80, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**16), cut=st.integers(0, 6))
def test_verification_accepts_the_oracles_path(shape, seed, cut):
    """Random trees over a 3-word vocabulary, packed rows, and an accept width that may be short."""
    topk, depth, num_drafts, bs = shape
    rng, num_drafts, drafts = _batch(seed, topk, depth, num_drafts, bs)
    nodes, width = num_drafts + 1, max(1, depth + 1 - cut)
    trees = [oracles.tree_from_candidates(p, s, topk) for p, s in drafts]
    tokens = [[rng.randrange(3) for _ in range(nodes)] for _ in range(bs)]
    target = [[rng.randrange(3) for _ in range(nodes)] for _ in range(bs)]
    index = torch.randperm(bs * nodes).view(bs, nodes)  # rows may lie anywhere in the batch
    by_row = torch.empty(bs * nodes, dtype=torch.long)
    by_row[index.flatten()] = torch.tensor(target).flatten()
    predicts = torch.full((bs * nodes,), -7, dtype=torch.int32)
    accept = torch.full((bs, width), -1, dtype=torch.int32)
    count = torch.empty(bs, dtype=torch.int32)
    verify_tree(
        predicts, accept, count, torch.tensor(tokens), index,
        torch.tensor([t[1] for t in trees]), torch.tensor([t[2] for t in trees]), by_row,
    )  # fmt: skip
    expected = predicts.new_full(predicts.shape, -7)
    for b, (parents, _, _, _) in enumerate(trees):
        path = oracles.accepted_path(parents, tokens[b], target[b])[:width]
        rows = [int(index[b, node]) for node in path]
        assert accept[b].tolist() == rows + [-1] * (width - len(rows))
        assert int(count[b]) == len(path) - 1
        expected[rows] = by_row[rows].int()
    assert predicts.tolist() == expected.tolist()


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_slots_of_ranges_are_packed_and_written_back(lengths, seed):
    """gather_ranges reads what a loop reads; scatter_ranges puts it back where it was."""
    rng = random.Random(seed)
    bs = len(lengths)
    req_to_token = torch.randint(1, 1000, (8, 20), dtype=torch.int32)
    rows = torch.tensor(rng.sample(range(8), bs))
    start = torch.tensor([rng.randrange(15) for _ in range(bs)])
    end = start + torch.tensor(lengths)
    wanted = [
        int(req_to_token[r, c])
        for r, a, b in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
        for c in range(a, b)
    ]
    out = torch.full((sum(lengths) + 2,), -7)
    cache_locs.gather_ranges(rows, req_to_token, start, end, out, 20)
    assert out.tolist() == [*wanted, -7, -7]
    copy = torch.zeros_like(req_to_token)
    cache_locs.scatter_ranges(rows, copy, start, end, out, 20)
    for r, a, b in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        assert torch.equal(copy[r, a:b], req_to_token[r, a:b])
    assert int((copy != 0).sum()) == len(wanted)


def test_draft_slots_follow_the_prefix():
    """Two requests, 2 beams of 2 steps: the four slots after each committed length."""
    req_to_token = torch.arange(30, dtype=torch.int32).view(3, 10)
    out = torch.empty(8, dtype=torch.long)
    cache_locs.draft_locs(torch.tensor([2, 0]), req_to_token, torch.tensor([1, 3]), out, 10, 2, 2)
    assert out.tolist() == [21, 22, 23, 24, 3, 4, 5, 6]


def test_bonus_tokens_are_the_last_accepted_ones():
    """Three requests with 1, 3 and 2 accepted tokens of at most 3."""
    bonus = torch.empty(3, dtype=torch.int32)
    commit.fill_bonus_tokens(torch.arange(9, dtype=torch.int32), torch.tensor([1, 3, 2]), bonus, 3)
    assert bonus.tolist() == [0, 5, 7]


def test_accepted_slots_are_packed_in_order():
    """-1 marks unused accept places."""
    out = torch.zeros(6, dtype=torch.long)
    accept = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    commit.fill_accepted_locs(accept, torch.tensor([50, 51, 52, 53, 54, 55]), out)
    assert out.tolist() == [50, 52, 53, 0, 0, 0]


def test_rotation_shifts_each_request_by_one():
    """Requests of 3, 0 and 1 tokens; then with chosen rows for the new tokens."""
    start, lengths = torch.tensor([0, 3, 3]), torch.tensor([3, 0, 1])
    ids = torch.tensor([1, 2, 3, 4])
    commit.rotate_input_ids(ids, start, lengths, torch.tensor([[9], [7], [8]]))
    assert ids.tolist() == [2, 3, 9, 8]
    ids = torch.tensor([1, 2, 3, 4])
    commit.rotate_input_ids(ids, start, lengths, torch.tensor([9, 7, 8]), torch.tensor([1, 3, 3]))
    assert ids.tolist() == [2, 9, 3, 8]


def test_kv_rows_move_in_every_layer_even_when_ranges_overlap():
    """Reads finish before writes: 1 -> 0 and 2 -> 1 shift rows, they do not smear one row."""
    buffers = [torch.randn(5, 2, 3), torch.randn(5, 2, 3).to(torch.bfloat16)]
    before = [b.clone() for b in buffers]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b.stride(0) * b.element_size() for b in buffers])
    kv_copy.copy_all_layers(pointers, strides, torch.tensor([0, 1]), torch.tensor([1, 2]))
    for now, old in zip(buffers, before, strict=True):
        assert torch.equal(now[:2], old[1:3])
        assert torch.equal(now[2:], old[2:])
    kv_copy.copy_all_layers(
        pointers, strides, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    )

"""References of attention against attention by hand: split over a prefix, and through pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_c2t.kernels import gate
from tests.emulated import kernels, references
from tests.emulated.torch_cuda import installed
from tests.kernels.test_gate import NETWORKS, program, random_layer

HEADS, KEY_HEADS, SIZE, POOL = 4, 2, 8, 40
SCALE = 0.3


def workspace(rows: list[int], keys: list[int]) -> Tensor:
    """As a plan leaves it."""
    words = torch.tensor([len(keys), *rows, *keys], dtype=torch.int32).view(torch.uint8)
    return torch.cat([words, torch.zeros(64, dtype=torch.uint8)])


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[R, H, D]: each row sees all keys up to its own, and the rows are the last of them."""
    out = torch.empty((*q.shape[:2], v.shape[-1]))
    for row in range(len(q)):
        seen = len(k) - len(q) + row + 1
        for head in range(HEADS):
            of_keys = head * KEY_HEADS // HEADS
            weights = (k[:seen, of_keys] @ q[row, head] * SCALE).softmax(0)
            out[row, head] = weights @ v[:seen, of_keys]
    return out


def drawn(rows: int, keys: int, seed: int) -> tuple[Tensor, ...]:
    """Queries, a pool of keys and one of values, and the slots of the keys."""
    torch.manual_seed(seed)
    q = torch.randn(rows, HEADS, SIZE)
    pools = (torch.randn(POOL, 1, KEY_HEADS, SIZE) for _ in range(2))
    return q, *pools, torch.randperm(POOL)[:keys].int()


@given(rows=st.integers(1, 8), prefix=st.integers(0, 9), seed=st.integers(0, 1000))
def test_flashinfer_over_a_prefix_and_its_rows_is_attention_over_both(
    rows: int, prefix: int, seed: int
) -> None:
    q, k, v, slots = drawn(rows, prefix + rows, seed)
    k_rows, v_rows = (pool[slots.long(), 0] for pool in (k, v))
    starts, before = torch.tensor([0, rows]), torch.tensor([0, prefix])
    own, seen, both = (torch.empty_like(q) for _ in range(3))
    own_sums, seen_sums, sums = (torch.empty(rows, HEADS) for _ in range(3))
    kernels.ragged(
        workspace([0, rows], [rows]), q, k_rows[prefix:], v_rows[prefix:], starts, starts, own,
        own_sums, 1, None, None, SCALE,
    )  # fmt: skip
    kernels.paged(
        workspace([0, rows], [prefix or 1]), q, k, v, starts, before, slots[:prefix],
        torch.tensor([1]), seen, seen_sums, 0, None, None, SCALE,
    )  # fmt: skip
    kernels.merge_state(own, own_sums, seen, seen_sums, both, sums)
    torch.testing.assert_close(both, by_hand(q, k_rows, v_rows))


@given(rows=st.lists(st.integers(0, 4), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_flashinfer_over_latents_is_attention_to_one_head_of_keys(
    rows: list[int], seed: int
) -> None:
    """Merge partial results; the first part is read too, and a plan may leave no part."""
    torch.manual_seed(seed)
    latents, turned = torch.randn(POOL, 1, SIZE), torch.randn(POOL, 1, 2)
    q, q_turned = torch.randn(sum(rows), HEADS, SIZE), torch.randn(sum(rows), HEADS, 2)
    lengths = [3 + n for n in rows]
    starts, keys = (torch.tensor([0, *of]).cumsum(0).int() for of in (rows, lengths))
    indices = torch.randint(POOL, (int(keys[-1]),)).int()
    memory = torch.zeros(256, dtype=torch.uint8)
    plan = mock.Mock(return_value=True)
    with mock.patch.object(kernels, "pinned", plan):
        info, count = kernels.mla_plan(memory, memory, memory, starts, keys, torch.tensor(lengths),
                                       HEADS, SIZE, True)  # fmt: skip
    out = torch.empty_like(q)
    kernels.mla(memory[:count], info[0], q, q_turned, latents, turned, indices, out, None, True, 1,
                SCALE)  # fmt: skip
    for b, n in enumerate(rows):
        mine, seen = slice(starts[b], starts[b + 1]), indices[keys[b] : keys[b + 1]].long()
        both = torch.cat((latents[seen], turned[seen]), -1).expand(-1, KEY_HEADS, -1)
        read = latents[seen].expand(-1, KEY_HEADS, -1)
        asked = torch.cat((q[mine], q_turned[mine]), dim=-1)
        if n:
            torch.testing.assert_close(out[mine], by_hand(asked, both, read))


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    prefix=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_fa3_over_pages_is_attention_of_each_request(
    rows: list[int], prefix: int, seed: int
) -> None:
    every = [drawn(n, prefix + n, seed + i) for i, n in enumerate(rows)]
    k, v = every[0][1:3]
    table = torch.zeros(len(rows), prefix + max(rows), dtype=torch.int32)
    for b, (_, _, _, slots) in enumerate(every):
        table[b, : len(slots)] = slots
    q = torch.cat([of[0] for of in every])
    starts = torch.tensor([0, *rows]).cumsum(0)
    out, lse = torch.empty_like(q), torch.empty(HEADS, len(q))
    lengths = torch.tensor(rows) + prefix
    kernels.fa3_paged(out, lse, q, k, v, lengths, table, starts, max(rows), SCALE, True, -1)
    for b, (queries, _, _, slots) in enumerate(every):
        wanted = by_hand(queries, k[slots.long(), 0], v[slots.long(), 0])
        torch.testing.assert_close(out[starts[b] : starts[b + 1]], wanted)


class Launched:
    """A reference, launched as its kernel is."""

    def __init__(self, reference: Callable[..., None]) -> None:
        self._reference = reference

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._reference


def test_the_reference_of_the_gate_takes_what_its_kernels_take() -> None:
    logits, layer = random_layer(5, 300, 4, seed=1)
    network = program(NETWORKS[-1])
    with (
        mock.patch.object(gate, "logit_partials", Launched(references.logit_partials)),
        mock.patch.object(gate, "judge", Launched(references.judge)),
        mock.patch.object(gate, "runs_triton", return_value=True),
    ):
        judged = gate.judge_layer(logits, network, **layer, width=2)
    twins = gate.judge_layer_reference(logits, network, **layer, width=2)
    for mine, theirs in zip(judged, twins, strict=True):
        assert torch.equal(mine, theirs)


def test_the_gates_twin_computes_where_its_tensors_lie() -> None:
    """On a GPU it is what the kernels are compared with; tensors of the host would not mix."""
    logits, layer = random_layer(5, 300, 4, seed=1)
    here = gate.judge_layer_reference(logits, program(NETWORKS[-1]), **layer, width=2)
    with installed():
        moved = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in layer.items()}
        network = program(NETWORKS[-1], device="cuda")
        there = gate.judge_layer_reference(logits.cuda(), network, **moved, width=2)
        for mine, theirs in zip(there, here, strict=True):
            assert mine.is_cuda
            torch.testing.assert_close(mine.cpu(), theirs)


def test_slots_are_read_before_any_is_written() -> None:
    wide, narrow = torch.arange(12.0).view(6, 2), torch.arange(6.0).view(6, 1)
    addresses = torch.tensor([wide.data_ptr(), narrow.data_ptr()])
    sources, targets = torch.tensor([1, 2, 4, 0]), torch.tensor([2, 1, 3, 5])
    references.copy_slots(addresses, torch.tensor([8, 4]), targets, sources, 3)
    assert narrow[:, 0].tolist() == [0, 2, 1, 4, 4, 5]
    assert wide[:, 0].tolist() == [0, 4, 2, 8, 8, 10]

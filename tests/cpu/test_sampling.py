"""Draws that depend on seed and position only, and "sample one token per row, then match"."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_c2t.cpu.sampling import murmur_hash32
from sglang_c2t.cpu.tree_verify import verify_tree
from sglang_c2t.tree import child_links
from tests import oracles

VOCAB = 3


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    column=st.integers(0, 2**31 - 1),
)
def test_hash_equals_the_oracle(seed, position, column):
    """64-bit seeds of either sign, as SGLang passes them (int64 cast to uint64)."""
    hashed = murmur_hash32(
        torch.tensor([seed]).to(torch.uint64), torch.tensor([position]), torch.tensor([column])
    )
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == [[oracles.murmur3(seed, position, column)]]


def test_hash_of_a_batch_is_the_hash_of_its_rows():
    """Seeded draws may not depend on who else is in the batch."""
    seeds = torch.tensor([1, -5, 2**40]).to(torch.uint64)
    positions, columns = torch.tensor([7, 8, 9]), torch.arange(11)
    batch = murmur_hash32(seeds, positions, columns)
    for i in range(3):
        alone = murmur_hash32(seeds[i : i + 1], positions[i : i + 1], columns)
        assert torch.equal(batch[i : i + 1], alone)


def _target(prefix: tuple[int, ...]) -> torch.Tensor:
    """A made-up target model: a distribution over 3 tokens that depends on the prefix."""
    logits = torch.tensor([math.sin(1 + t + 3 * sum(prefix) + len(prefix)) for t in range(VOCAB)])
    return torch.softmax(2 * logits, dim=0)


def test_sample_then_match_emits_the_targets_distribution():
    """Tree root -> {0, 1}, 0 -> {2}: first two emitted tokens against p(a) p(b | a).

    When only one token is emitted, the second is drawn directly, as the next round would.
    20 000 rounds, 9 outcomes, 8 degrees of freedom: chi-square > 26.1 has odds 0.001; the seed
    is fixed, so a failure is a defect and not bad luck.
    """
    torch.manual_seed(20)
    rounds = 20_000
    parents = torch.tensor([[-1, 0, 0, 1]]).repeat(rounds, 1)
    tokens = torch.tensor([[9, 0, 1, 2]]).repeat(rounds, 1)
    prefixes = [(), (0,), (1,), (0, 2)]
    rows = torch.arange(rounds * 4).view(rounds, 4)
    drawn = torch.stack(
        [torch.multinomial(_target(p), rounds, replacement=True) for p in prefixes], dim=1
    )
    predicts = torch.zeros(rounds * 4, dtype=torch.int32)
    accept = torch.full((rounds, 3), -1, dtype=torch.int32)
    count = torch.empty(rounds, dtype=torch.int32)
    verify_tree(predicts, accept, count, tokens, rows, *child_links(parents), drawn)
    first = predicts[accept[:, 0]]
    alone = torch.stack(
        [torch.multinomial(_target((a,)), rounds, replacement=True) for a in range(VOCAB)]
    )
    later = alone[first.long(), torch.arange(rounds)]
    second = torch.where(count > 0, predicts[accept[:, 1].clamp(min=0)], later.int())
    seen = torch.bincount(first.long() * VOCAB + second.long(), minlength=9).double()
    wanted = torch.cat([_target(())[a] * _target((a,)) for a in range(VOCAB)]).double() * rounds
    chi_square = float(((seen - wanted) ** 2 / wanted).sum())
    assert int((count > 0).sum()) > 1000, "the test must see accepted drafts"
    assert chi_square < 26.1, f"chi-square {chi_square}, seen {seen.tolist()}"

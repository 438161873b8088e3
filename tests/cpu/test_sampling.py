"""Draws that depend on seed and position only."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_c2t.cpu.sampling import murmur_hash32
from tests import oracles


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

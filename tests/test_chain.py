"""Draft chains: gating, truncation, packing, against loops that are obviously right."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.chain import (
    ChainGate,
    packed_rows,
    truncated_chains,
    unpack_rows,
    verified_rows,
)
from sglang_c2t.classifier.features import token_stats
from sglang_c2t.config import ConfigError
from sglang_c2t.policies import DraftLayer
from sglang_c2t.policies.fixed import Fixed

# A batch of verify lengths and the width of a full chain; empty batch, all 1, all full included.
lens_and_width = st.integers(1, 9).flatmap(
    lambda width: st.tuples(st.lists(st.integers(1, width), max_size=12), st.just(width))
)


class Scripted:
    """Keeps what a table [D][B] says, and remembers what it was shown."""

    name = "scripted"
    needs = frozenset()

    def __init__(self, table: list[list[bool]]) -> None:
        self.table = table
        self.seen: list[DraftLayer] = []

    def keep(self, layer: DraftLayer) -> torch.Tensor:
        self.seen.append(layer)
        return torch.tensor(self.table[layer.depth - 1], dtype=torch.bool)


def run_gate(gate: ChainGate, logits: torch.Tensor) -> torch.Tensor:
    """Drive a gate as SGLang does: ``logits`` is [D, B, V], the first layer is relayed."""
    slots = torch.arange(logits.shape[1])
    gate.relay_first_token(slots, logits[0])
    gate.begin(slots)
    for layer in logits[1:]:
        gate.observe(layer)
    return gate.verify_lens


@given(
    st.integers(1, 6).flatmap(
        lambda depth: st.integers(0, 5).flatmap(
            lambda batch: st.lists(
                st.lists(st.booleans(), min_size=batch, max_size=batch),
                min_size=depth,
                max_size=depth,
            )
        )
    )
)
def test_a_chain_ends_at_its_first_dropped_token(table: list[list[bool]]) -> None:
    """Once the policy drops a token, later layers cannot revive the chain."""
    batch = len(table[0])
    gate = ChainGate(Scripted(table), num_slots=batch, device="cpu")
    lens = run_gate(gate, torch.zeros(len(table), batch, 4))
    expected = []
    for request in range(batch):
        kept = 0
        for layer in table:
            if not layer[request]:
                break
            kept += 1
        expected.append(kept + 1)
    assert lens.tolist() == expected
    assert lens.dtype == torch.int32


def test_the_policy_sees_joint_probability_entropy_and_depth() -> None:
    """P is the running product of the argmax probabilities; depth counts from 1."""
    policy = Scripted([[True, True]] * 3)
    logits = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(0))
    run_gate(ChainGate(policy, num_slots=2, device="cpu"), logits)
    for request in range(2):
        joint = 1.0
        for depth, layer in enumerate(policy.seen, start=1):
            probs = torch.softmax(logits[depth - 1, request].double(), dim=-1)
            joint *= probs.max().item()
            entropy = -(probs * probs.log()).sum().item()
            assert layer.depth == depth
            assert abs(layer.joint[request].item() - joint) < 1e-6
            assert abs(layer.prob[request].item() - probs.max().item()) < 1e-6
            assert abs(layer.entropy[request].item() - entropy) < 1e-5


def test_first_tokens_are_relayed_per_slot() -> None:
    """Statistics follow the request's slot, whatever the order of the next batch."""
    policy = Scripted([[True, True]])
    gate = ChainGate(policy, num_slots=5, device="cpu")
    sharp, flat = torch.tensor([9.0, 0.0, 0.0]), torch.zeros(3)
    gate.relay_first_token(torch.tensor([4, 1]), torch.stack((sharp, flat)))
    gate.begin(torch.tensor([1, 4]))
    assert policy.seen[0].prob.tolist() == [
        token_stats(flat[None]).prob.item(),
        token_stats(sharp[None]).prob.item(),
    ]


def test_a_first_token_nobody_measured_leaves_the_gate_open() -> None:
    policy = Scripted([[True]])
    gate = ChainGate(policy, num_slots=3, device="cpu")
    gate.begin(torch.tensor([2]))
    assert policy.seen[0].prob.tolist() == [1.0]
    assert policy.seen[0].entropy.tolist() == [0.0]


def test_a_policy_that_needs_more_than_is_measured_is_refused() -> None:
    """Better than a None in the middle of a draft."""

    class Hungry(Scripted):
        needs = frozenset({"hidden"})

    with pytest.raises(ConfigError, match="policy scripted needs hidden"):
        ChainGate(Hungry([[True]]), num_slots=1, device="cpu")


def test_rank_zero_decides_for_all_ranks() -> None:
    """What ``agree`` returns wins over the local policy."""
    gate = ChainGate(
        Fixed(),
        num_slots=3,
        device="cpu",
        agree=lambda keep: torch.tensor([1, 0, 1], dtype=torch.uint8),
    )
    assert run_gate(gate, torch.zeros(2, 3, 4)).tolist() == [3, 1, 3]


@given(lens_and_width)
def test_a_cut_chain_links_to_nothing_behind_its_last_row(case: tuple[list[int], int]) -> None:
    lens, width = case
    link = torch.tensor([*range(1, width), -1]).repeat(len(lens), 1)
    cut = truncated_chains(link, torch.tensor(lens, dtype=torch.int32))
    for row, length in zip(cut.tolist(), lens, strict=True):
        assert row == [j + 1 if j < length - 1 else -1 for j in range(width)]


@given(lens_and_width)
def test_packing_keeps_exactly_the_surviving_rows_in_order(case: tuple[list[int], int]) -> None:
    lens, width = case
    rows = packed_rows(torch.tensor(lens, dtype=torch.int32), width)
    assert rows.tolist() == [b * width + j for b, n in enumerate(lens) for j in range(n)]


@given(lens_and_width)
def test_unpacking_is_the_inverse_of_packing_with_zeros_between(
    case: tuple[list[int], int],
) -> None:
    lens, width = case
    rows = packed_rows(torch.tensor(lens, dtype=torch.int32), width)
    num_rows = len(lens) * width
    full = torch.arange(1.0, num_rows * 2 + 1).reshape(num_rows, 2)
    unpacked = unpack_rows(full[rows], rows, num_rows)
    kept = set(rows.tolist())
    for i in range(num_rows):
        assert unpacked[i].tolist() == (full[i].tolist() if i in kept else [0.0, 0.0])


def test_only_verified_tokens_are_recorded_and_labelled() -> None:
    """Request 0 verifies 2 drafts and accepts 1, request 1 verifies none."""
    ones = torch.ones(2)
    layers = [
        DraftLayer(depth=d, prob=ones / 2, joint=ones / 2**d, entropy=ones, alive=ones.bool())
        for d in (1, 2, 3)
    ]
    rows = verified_rows(layers, torch.tensor([3, 1]), torch.tensor([2, 1]), torch.tensor([70, 71]))
    assert rows["depth"].tolist() == [1, 2]
    assert rows["accept"].tolist() == [1, 0]
    assert rows["request"].tolist() == [70, 70]
    assert rows["joint"].tolist() == [0.5, 0.25]

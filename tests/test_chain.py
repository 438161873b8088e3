"""Draft chains: gating, truncation, packing, against loops that are obviously right."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.chain import (
    ChainGate,
    matched_drafts,
    packed_rows,
    truncated_chains,
    unpack_rows,
)
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import HISTORY, measure
from sglang_c2t.policies import DraftLayer
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.relay import Exploration

# A batch of verify lengths and the width of a full chain; empty batch, all 1, all full included.
lens_and_width = st.integers(1, 9).flatmap(
    lambda width: st.tuples(st.lists(st.integers(1, width), max_size=12), st.just(width))
)


class Scripted:
    """Keeps what a table [D][B] says, and remembers what it was shown."""

    name = "scripted"

    def __init__(self, table: list[list[bool]], needs: frozenset[str] = frozenset()) -> None:
        self.table = table
        self.needs = needs
        self.seen: list[DraftLayer] = []

    def keep(self, layer: DraftLayer) -> torch.Tensor:
        self.seen.append(layer)
        return torch.tensor(self.table[layer.depth - 1], dtype=torch.bool)


class Scheduled(Exploration):
    """Explores the steps that a list names."""

    names = frozenset({"margin"})

    def __init__(self, *steps: bool) -> None:
        self.steps = list(steps)

    def next_step_explores(self) -> bool:
        return self.steps.pop(0)


def run_gate(gate: ChainGate, logits: torch.Tensor) -> torch.Tensor:
    """Drive a gate as SGLang does: ``logits`` is [D, B, V], the first layer is relayed."""
    slots = torch.arange(logits.shape[1])
    gate.join(slots, logits[0])
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


@pytest.mark.parametrize("enter", [ChainGate.join, ChainGate.relay_first_token])
def test_first_tokens_are_relayed_per_slot(enter: Callable[..., None]) -> None:
    """Whatever the policy needs follows the request's slot, whatever the next batch's order."""
    needs = frozenset({"margin", "topk_prob", "hidden"})
    policy = Scripted([[True, True]], needs)
    gate = ChainGate(policy, num_slots=5, device="cpu")
    logits, hidden = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), torch.rand(2, 3)
    enter(gate, torch.tensor([4, 1]), logits, hidden)
    gate.begin(torch.tensor([1, 4]))
    for name, values in measure(logits, needs, hidden=hidden).items():
        assert torch.equal(policy.seen[0].measured[name], values.flip(0)), name


def test_every_layer_carries_what_the_policy_needs_and_the_layer_before() -> None:
    policy = Scripted([[True, False]] * 3, frozenset({"margin", "hidden"}))
    gate = ChainGate(policy, num_slots=2, device="cpu")
    generator = torch.Generator().manual_seed(0)
    logits, hidden = torch.randn(3, 2, 7, generator=generator), torch.rand(3, 2, 4)
    slots = torch.arange(2)
    gate.join(slots, logits[0], hidden[0])
    gate.begin(slots)
    for depth in (1, 2):
        gate.observe(logits[depth], hidden[depth])
    assert gate.layers == policy.seen
    assert [layer.alive.tolist() for layer in gate.layers] == [[True, True]] + [[True, False]] * 2
    for depth, layer in enumerate(gate.layers):
        assert layer.parent is (gate.layers[depth - 1] if depth else None)
        expected = measure(logits[depth], ["margin"])["margin"]
        assert torch.equal(layer.measured["margin"], expected)
        assert torch.equal(layer.measured["hidden"], hidden[depth])


def test_a_step_starts_afresh() -> None:
    policy = Scripted([[False, True], [True, True]])
    gate = ChainGate(policy, num_slots=2, device="cpu")
    for _ in range(2):
        assert run_gate(gate, torch.zeros(2, 2, 4)).tolist() == [1, 3]
        assert len(gate.layers) == 2
        assert gate.any_alive()


def test_nobody_is_alive_once_all_chains_have_ended() -> None:
    gate = ChainGate(Scripted([[False, True], [True, False]]), num_slots=2, device="cpu")
    assert run_gate(gate, torch.zeros(1, 2, 4)).tolist() == [1, 2]
    assert gate.any_alive()
    gate.observe(torch.zeros(2, 4))
    assert not gate.any_alive()


def test_a_first_token_nobody_measured_leaves_the_gate_open() -> None:
    policy = Scripted([[True]], frozenset({"margin", "topk_prob"}))
    gate = ChainGate(policy, num_slots=3, device="cpu")
    gate.begin(torch.tensor([2]))
    assert policy.seen[0].prob.tolist() == [1.0]
    assert policy.seen[0].entropy.tolist() == [0.0]
    assert policy.seen[0].measured["margin"].item() > 10
    assert policy.seen[0].measured["topk_prob"].tolist() == [[1.0] + [0.0] * 9]


@pytest.mark.parametrize("name", sorted(HISTORY))
def test_a_policy_that_reads_a_requests_history_is_refused(name: str) -> None:
    """Better than a missing number in the middle of a draft."""
    with pytest.raises(ConfigError, match=f"policy scripted reads {name}: experimental"):
        ChainGate(Scripted([[True]], frozenset({name, "margin"})), num_slots=1, device="cpu")


def test_an_exploring_step_keeps_every_draft_whole_and_measures_more() -> None:
    policy = Scripted([[False, False]] * 3)
    gate = ChainGate(policy, num_slots=2, device="cpu", exploration=Scheduled(True))
    assert run_gate(gate, torch.rand(3, 2, 4)).tolist() == [4, 4]
    assert gate.exploring
    assert policy.seen == []
    assert all("margin" in layer.measured for layer in gate.layers)
    assert gate.first_tokens_complete(torch.arange(2)).tolist() == [True, True]


def test_the_steps_between_explorations_are_the_policys() -> None:
    """Each step is asked for once, when its first tokens are measured."""
    gate = ChainGate(
        Scripted([[False]]),
        num_slots=1,
        device="cpu",
        exploration=Scheduled(False, True, False, False),
    )
    slot, logits = torch.tensor([0]), torch.zeros(1, 4)
    gate.join(slot, logits)
    seen = []
    for _ in range(3):
        gate.begin(slot)
        seen.append((gate.exploring, gate.verify_lens.tolist()))
        gate.relay_first_token(slot, logits)
    assert seen == [(False, [1]), (True, [2]), (False, [1])]


@pytest.mark.parametrize(("needs", "complete"), [(set(), False), ({"margin"}, True)])
def test_a_first_token_measured_without_the_extra_names_is_not_complete(
    needs: set[str], complete: bool
) -> None:
    """Request 1 sat out the step before the exploring one, so its first token was measured
    for a policy's step; request 2 joins with everything, because nobody knows what comes.
    """
    policy = Scripted([[True] * 4], frozenset(needs))
    gate = ChainGate(policy, num_slots=4, device="cpu", exploration=Scheduled(False, False, True))
    logits = torch.zeros(2, 4)
    gate.join(torch.tensor([0, 1]), logits)
    gate.relay_first_token(torch.tensor([0, 1]), logits)  # the next step does not explore
    gate.relay_first_token(torch.tensor([0]), logits[:1])  # the one after does
    gate.join(torch.tensor([2]), logits[:1])
    slots = torch.tensor([2, 1, 0, 3])
    gate.begin(slots)
    assert gate.exploring
    # Nobody ever measured anything for slot 3.
    assert gate.first_tokens_complete(slots).tolist() == [True, complete, True, False]


def test_without_exploration_nothing_more_is_measured() -> None:
    policy = Scripted([[True]])
    gate = ChainGate(policy, num_slots=1, device="cpu")
    run_gate(gate, torch.zeros(1, 1, 4))
    assert not gate.exploring
    assert set(policy.seen[0].measured) == {"prob", "entropy"}


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


@given(
    st.integers(0, 5).flatmap(
        lambda depth: st.lists(
            st.tuples(*[st.lists(st.integers(0, 2), min_size=depth + 1, max_size=depth + 1)] * 2),
            max_size=6,
        ).map(lambda chains: (depth, chains))
    )
)
def test_matched_drafts_counts_up_to_the_first_the_target_would_not_have_chosen(
    case: tuple[int, list[tuple[list[int], list[int]]]],
) -> None:
    """A draft stands one row behind the target's choice for it."""
    depth, chains = case
    expected = []
    for drafts, target in chains:
        matched = 0
        while matched < depth and drafts[matched + 1] == target[matched]:
            matched += 1
        expected.append(matched)
    columns = torch.tensor(chains, dtype=torch.long).reshape(len(chains), 2, depth + 1)
    assert matched_drafts(columns[:, 0], columns[:, 1]).tolist() == expected

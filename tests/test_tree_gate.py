"""The gate around growing trees: relayed first layers, exploring steps, budget, agreement."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import measure
from sglang_c2t.growth import TreeGrowth, node_margins
from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.fork import Fork
from sglang_c2t.relay import Exploration
from sglang_c2t.tree import Trees, within_budget
from sglang_c2t.tree_gate import TreeGate

VOCAB = 12
SHAPE = TreeShape(topk=3, num_steps=3, num_draft_tokens=9)
ROOTS = torch.tensor([70, 71])


class Scripted:
    """Keeps every node or none, and remembers the layers it was shown."""

    name: ClassVar[str] = "scripted"

    def __init__(self, keep: bool = True, needs: frozenset[str] = frozenset()) -> None:
        self.keep = keep
        self.needs = needs
        self.seen: list[TreeLayer] = []

    def check(self, shape: TreeShape) -> None:
        assert shape == SHAPE

    def grow(self, layer: TreeLayer) -> Growth:
        self.seen.append(layer)
        key = layer.joint if self.keep else torch.full_like(layer.joint, -torch.inf)
        return Growth(key=key, expand=key)


class Scheduled(Exploration):
    """Explores the steps that a list names."""

    names = frozenset({"margin", "entropy_top4"})

    def __init__(self, *steps: bool) -> None:
        self.steps = list(steps)

    def next_step_explores(self) -> bool:
        return self.steps.pop(0)


def gate_of(policy: Any, **options: Any) -> TreeGate:
    return TreeGate(policy, SHAPE, num_slots=8, device="cpu", **options)


def logits(rows: int, seed: int) -> Tensor:
    """[rows, V] float32."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def choices(of: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, probabilities) [rows, K], as SGLang's ``fast_topk``."""
    prob, token = of.softmax(dim=1).topk(SHAPE.topk)
    return token, prob


def run_step(
    gate: TreeGate, slots: Tensor, first: Tensor, *, seed: int = 5
) -> tuple[Trees, Tensor]:
    """A whole step as SGLang drives it; ``first`` [B, V] was drafted in the step before."""
    gate.begin(slots)
    batch, of, width = len(slots), first, 1
    for step in range(SHAPE.num_steps):
        token, prob = choices(of)
        gate.add(*(values.view(batch, width, SHAPE.topk) for values in (token, prob)))
        if step < SHAPE.num_steps - 1:
            width = SHAPE.topk
            of = logits(batch * width, seed + step)
            gate.observe(of)
    return gate.finish()


def settled(gate: TreeGate, slots: Tensor, first: Tensor) -> Trees:
    return gate.settle(*run_step(gate, slots, first), ROOTS)


# -- the first layer is measured in the step before ---------------------------------------


@pytest.mark.parametrize("enter", ["join", "relay_first_token"])
def test_the_first_layers_measurements_find_their_requests(enter: str) -> None:
    """By slot, whatever places the requests have in the next batch; one row per child."""
    policy = Scripted(needs=frozenset({"margin", "topk_prob", "hidden"}))
    gate = gate_of(policy)
    first, hidden = logits(3, 0), torch.arange(6.0).view(3, 2)
    getattr(gate, enter)(torch.tensor([6, 2, 4]), first, hidden)
    gate.begin(torch.tensor([4, 6]))
    here = first[[2, 0]]
    token, prob = choices(here)
    gate.add(token[:, None], prob[:, None])
    (layer,) = policy.seen
    said = measure(here, ["topk_prob"])
    assert torch.equal(layer.entropy, said["entropy"][:, None, None].expand(-1, 1, SHAPE.topk))
    measured = layer.nodes.measured
    assert torch.equal(measured["margin"], node_margins(prob))
    assert torch.equal(measured["topk_prob"], said["topk_prob"].repeat_interleave(3, dim=0))
    assert torch.equal(measured["hidden"], hidden[[2, 0]].repeat_interleave(3, dim=0))
    assert torch.equal(layer.nodes.prob, prob.flatten())


def test_later_layers_are_measured_from_the_rows_just_forwarded() -> None:
    policy = Scripted(needs=frozenset({"margin"}))
    gate = gate_of(policy)
    slots, first = torch.tensor([0, 1]), logits(2, 0)
    gate.join(slots, first)
    run_step(gate, slots, first, seed=5)
    assert [layer.depth for layer in policy.seen] == [1, 2, 3]
    assert gate.layers[1].nodes is policy.seen[1].nodes
    for layer, seed in zip(policy.seen[1:], (5, 6), strict=True):
        said = logits(6, seed)
        entropy = measure(said)["entropy"].view(2, 3, 1).expand(-1, -1, 3)
        assert torch.equal(layer.entropy, entropy)
        assert torch.equal(layer.nodes.measured["margin"], node_margins(choices(said)[1]))


def test_a_first_layer_nobody_measured_counts_as_certain() -> None:
    """Its prefill ran on another server; the gate stays open."""
    policy = Scripted()
    gate = gate_of(policy)
    run_step(gate, torch.tensor([3]), logits(1, 0))
    assert policy.seen[0].entropy.unique().tolist() == [0.0]


# -- what is verified ---------------------------------------------------------------------


def eagle2_trees(slots: Tensor, first: Tensor) -> Trees:
    """EAGLE-2's trees of the same draft."""
    gate = gate_of(EAGLE2())
    gate.join(slots, first)
    return settled(gate, slots, first)


def same(left: Trees, right: Trees) -> bool:
    return all(torch.equal(values, getattr(right, name)) for name, values in vars(left).items())


def test_an_exploring_step_verifies_eagle2s_whole_tree_and_measures_more() -> None:
    """Whatever the policy keeps and whatever the budget is, so that labels are uncensored."""
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    gate = gate_of(Scripted(keep=False), max_rows=3, exploration=Scheduled(True, False, True))
    gate.join(slots, first)
    assert gate.first_tokens_complete(slots).all()
    trees = settled(gate, slots, first)
    assert gate.exploring
    assert same(trees, eagle2_trees(slots, first))
    assert trees.num_nodes.tolist() == [SHAPE.num_draft_tokens] * 2
    assert {"margin", "entropy_top4"} <= set(gate.layers[0].nodes.measured)
    assert {"margin", "entropy_top4"} <= set(gate.layers[2].nodes.measured)
    gate.relay_first_token(slots, first)
    trees = settled(gate, slots, first)
    assert not gate.exploring
    assert trees.num_nodes.tolist() == [1, 1]
    assert "margin" not in gate.layers[0].nodes.measured


def test_trees_that_nobody_keeps_are_their_roots_and_stop_drafting() -> None:
    gate = gate_of(Scripted(keep=False))
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    gate.begin(slots)
    assert gate.batch == 2
    token, prob = choices(first)
    gate.add(token[:, None], prob[:, None])
    assert not gate.any_alive()
    trees = settled(gate, slots, first)
    assert trees.num_nodes.tolist() == [1, 1]
    assert trees.tokens[:, 0].tolist() == ROOTS.tolist()
    assert not trees.tokens[:, 1:].any()


@pytest.mark.parametrize("max_rows", [1, 2, 7, 12, 100])
def test_a_batch_is_cut_to_its_budget(max_rows: int) -> None:
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    gate = gate_of(EAGLE2(), max_rows=max_rows)
    drafted, keys = run_step(gate, slots, first)
    trees = gate.settle(drafted, keys, ROOTS)
    assert same(trees, within_budget(drafted.rooted(ROOTS), keys, max_rows))
    assert int(trees.num_nodes.sum()) == min(max(max_rows, 2), 18)


def test_rank_zero_decides_all_of_a_tree_in_one_message() -> None:
    """Shape and tokens: a rank that drafted anything else must verify rank 0's trees."""
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    theirs = eagle2_trees(slots, logits(2, 9))
    messages: list[Tensor] = []

    def agree(mine: Tensor) -> Tensor:
        assert mine.dtype == torch.int64
        messages.append(mine)
        fields = (theirs.tokens, theirs.parents, theirs.depth, theirs.source)
        return torch.stack(fields)

    gate = gate_of(Scripted(keep=False), max_rows=4, agree=agree)
    gate.join(slots, first)
    assert same(settled(gate, slots, first), theirs)
    assert len(messages) == 1


def test_a_step_starts_afresh() -> None:
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    gate = gate_of(EAGLE2())
    gate.join(slots, first)
    once = settled(gate, slots, first)
    assert same(settled(gate, slots, first), once)
    assert gate.ancestor_rows.shape == (2, SHAPE.topk, SHAPE.num_steps - 1)


def test_the_gate_grows_what_its_policy_grows() -> None:
    """Nothing is added to, or taken from, the books of :class:`TreeGrowth`."""
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    gate = gate_of(Fork(2))
    gate.join(slots, first)
    trees, keys = run_step(gate, slots, first)
    growth = TreeGrowth(Fork(2), SHAPE, 2, "cpu")
    of, width = first, 1
    for step in range(SHAPE.num_steps):
        shaped = (values.view(2, width, SHAPE.topk) for values in choices(of))
        growth.add(*shaped, {"entropy": measure(of)["entropy"]})
        of, width = logits(6, 5 + step), SHAPE.topk
    alone, same_keys = growth.finish(torch.zeros(2))
    assert same(trees, alone)
    assert torch.equal(keys, same_keys)


# -- what is refused ----------------------------------------------------------------------


def test_a_policy_that_does_not_fit_the_trees_is_refused() -> None:
    with pytest.raises(ConfigError, match="width 4 needs --speculative-eagle-topk 4"):
        gate_of(Fork(4))


def test_a_policy_that_reads_a_requests_history_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads last_accept: experimental, in replay only"):
        gate_of(Scripted(needs=frozenset({"last_accept"})))

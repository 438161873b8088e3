"""A policy that fails while it serves costs the saving of its step, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.policies.base import DraftLayer, Growth, TreeLayer, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.tree import Trees

BATCH, STEPS, VOCABULARY = 3, 4, 20
SHAPE = TreeShape(topk=2, num_steps=3, num_draft_tokens=6)


@dataclass
class Failing:
    """Drops everything, or answers at some depths with what is wrong."""

    wrong: dict[int, Any] = field(default_factory=dict)
    name: ClassVar[str] = "failing"
    needs: ClassVar[frozenset[str]] = frozenset()
    asked: list[int] = field(default_factory=list)

    def _answer(self, layer: Any) -> Any:
        self.asked.append(layer.depth)
        wrong = self.wrong.get(layer.depth)
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    def keep(self, layer: DraftLayer) -> Any:
        answer = self._answer(layer)
        return torch.ones_like(layer.alive) if answer is None else answer

    def check(self, shape: TreeShape) -> None:
        """Any shape will do."""


@dataclass
class FailingTree(Failing):
    """The same for trees: ranks nodes the other way round than EAGLE-2."""

    def grow(self, layer: TreeLayer) -> Any:
        answer = self._answer(layer)
        return Growth(-layer.joint, -layer.joint) if answer is None else answer

    keep: Any = None


def chain_gate(policy: Any) -> ChainGate:
    return ChainGate(policy, num_slots=8, device="cpu")


def chain_step(gate: ChainGate) -> Tensor:
    """Lengths that one step of a batch gets."""
    slots, logits = torch.arange(BATCH), torch.randn(BATCH, VOCABULARY)
    gate.relay_first_token(slots, logits)
    gate.begin(slots)
    for _ in range(STEPS - 1):
        gate.observe(torch.randn(BATCH, VOCABULARY))
        gate.any_alive()
    return gate.agreed(gate.verify_lens)


def tree_step(policy: Any, *, seed: int, whole: Sequence[int] = ()) -> tuple[Trees, TreeGate]:
    """The trees of one step."""
    torch.manual_seed(seed)
    gate = TreeGate(policy, SHAPE, num_slots=8, device="cpu")
    gate.opt_outs.admit(range(BATCH), [row in whole for row in range(BATCH)])
    slots = torch.arange(BATCH)
    gate.relay_first_token(slots, torch.randn(BATCH, VOCABULARY))
    gate.begin(slots)
    for depth in range(SHAPE.num_steps):
        width = 1 if depth == 0 else SHAPE.topk
        prob, tokens = torch.randn(BATCH, width, VOCABULARY).softmax(dim=2).topk(SHAPE.topk)
        gate.add(tokens, prob)
        gate.observe(torch.randn(BATCH * SHAPE.topk, VOCABULARY))
    trees, keys = gate.finish()
    return gate.finalize(trees, keys, torch.zeros(BATCH, dtype=torch.int64)), gate


WRONG: list[Any] = [
    ValueError("no"), RuntimeError("cuda"), KeyError("x"), RecursionError(), MemoryError(),
    torch.ones(BATCH), torch.ones(1, dtype=torch.bool), "yes", 3, torch.ones(BATCH, 2).bool(),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("depth", [1, 2, STEPS])
def test_chain_gate_fallback_when_its_policy_fails_keeps_full_drafts(
    wrong: Any, depth: int
) -> None:
    policy = Failing({depth: wrong})
    gate = chain_gate(policy)
    assert chain_step(gate).tolist() == [STEPS + 1] * BATCH
    assert gate.fell_back
    assert policy.asked == list(range(1, depth + 1)), "asked no more in this step"


def test_chain_gate_fallback_keeps_what_was_cut_before_and_ends_with_the_step() -> None:
    cut = torch.tensor([True, False, True])
    policy = Failing({1: cut, 3: ValueError()})
    gate = chain_gate(policy)
    assert chain_step(gate).tolist() == [STEPS + 1, 1, STEPS + 1]
    policy.wrong = {1: torch.zeros(BATCH, dtype=torch.bool)}
    assert chain_step(gate).tolist() == [1] * BATCH
    assert not gate.fell_back


def test_chain_gate_fallback_is_one_log_line_of_each_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = chain_gate(Failing({1: ValueError("what\nhappened")}))
    for _ in range(3):
        chain_step(gate)
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert caplog.records[0].levelno == logging.ERROR
    assert "policy failing failed, so the server verifies full drafts there" in line
    assert "ValueError: what happened (" in line
    assert "test_fall_back.py, line" in line
    gate.switch(Failing({1: ValueError("another")}), captured=False)
    chain_step(gate)
    assert len(caplog.records) == 2


def test_chain_gate_failure_in_a_cuda_graph_is_refused() -> None:
    gate = chain_gate(Failing({1: ValueError("no")}))
    gate.served.capturing = True
    with pytest.raises(ConfigError, match="fails in a CUDA graph: ValueError: no; choose another"):
        chain_step(gate)


class Asked(EAGLE2):
    """In torch, as no kernel knows this class."""


@given(seed=st.integers(0, 2**16), depth=st.integers(1, SHAPE.num_steps))
def test_tree_gate_fallback_when_its_policy_fails_is_eagle2s_tree(seed: int, depth: int) -> None:
    """At whatever depth. Rows that were chosen before the failure were forwarded already, so
    only with the first layer's failure is it the tree that EAGLE-2 would have grown from the root.
    """
    trees, gate = tree_step(FailingTree({depth: ValueError()}), seed=seed)
    assert gate.fell_back
    assert trees.num_nodes.tolist() == [SHAPE.num_draft_tokens] * BATCH
    whole, _ = tree_step(Asked(), seed=seed)
    if depth == 1:
        assert torch.equal(trees.tokens, whole.tokens)
        assert torch.equal(trees.parents, whole.parents)
    _, keys = gate.finish()
    assert bool((keys[trees.parents >= 0] > 0).all()), "all ranked by probability, the first too"


@pytest.mark.parametrize(
    "wrong",
    [*WRONG, Growth(torch.ones(1), torch.ones(1)),
     Growth(torch.ones(BATCH, 1, 2), torch.ones(BATCH, 1, 2), torch.ones(BATCH, 1, 2))],
    ids=str,
)  # fmt: skip
def test_tree_gate_fallback_for_every_wrong_answer(wrong: Any) -> None:
    trees, _ = tree_step(FailingTree({1: wrong}), seed=0)
    assert trees.num_nodes.tolist() == [SHAPE.num_draft_tokens] * BATCH


def test_tree_gate_fallback_keeps_trees_of_requests_that_opted_out() -> None:
    trees, gate = tree_step(FailingTree({2: ValueError()}), seed=1, whole=[1])
    assert gate.fell_back
    assert trees.num_nodes[1] == SHAPE.num_draft_tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tree_gate_nan_key_drops_the_node_and_keeps_a_closed_tree(depth: int) -> None:
    def ranked(layer: TreeLayer) -> Growth:
        key = layer.joint.clone()
        if layer.depth == depth:
            key[:, :, 0] = torch.nan
        return Growth(key, key)

    policy = FailingTree()
    policy.grow = ranked  # type: ignore[method-assign]
    trees, gate = tree_step(policy, seed=2)
    assert not gate.fell_back
    _, keys = gate.finish()
    assert not bool(keys.isnan().any())
    live = trees.parents >= 0
    for row in range(BATCH):
        for node in range(1, int(trees.num_nodes[row])):
            assert 0 <= trees.parents[row, node] < node
    assert live.any()

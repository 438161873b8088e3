"""The gate around growing trees: relayed first layers, exploring steps, budget, agreement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from eval.baselines import Fork
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.draft.growth import node_margins
from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.draft_layer import measure
from sglang_c2t.policies import build_tree_policy
from sglang_c2t.policies.base import Growth, TreeLayer, TreePolicy, TreeShape
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.gated_tree import GatedTree
from sglang_c2t.tree import LINKS, PLANES, LinkedTrees, Trees, cut, within_budget
from tests.doubles import double
from tests.draft.own_rules import Scheduled, in_torch

VOCAB = 12
SHAPE = TreeShape(topk=3, num_steps=3, num_draft_tokens=9)
ROOTS = torch.tensor([70, 71])
MORE = frozenset({"margin", "entropy_top4"})


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


def gate_of(policy: Any, **options: Any) -> TreeGate:
    return TreeGate(policy, SHAPE, num_slots=8, device="cpu", **options)


def logits(rows: int, seed: int) -> Tensor:
    """[rows, V] float32."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def choices(of: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, probabilities) [rows, K], as SGLang's ``fast_topk``."""
    prob, token = of.softmax(dim=1).topk(SHAPE.topk)
    return token, prob


def add_first(gate: TreeGate, first: Tensor) -> None:
    """The layer below the root, drafted from these logits."""
    gate.add(*(values[:, None] for values in choices(first)))


def run_step(
    gate: TreeGate,
    slots: Tensor,
    first: Tensor,
    *,
    seed: int = 5,
    layers: int = SHAPE.num_steps,
    offered: Callable[[Tensor], tuple[Tensor, Tensor]] = choices,
    token_map: Tensor | None = None,
) -> tuple[Trees, Tensor]:
    """A whole step as SGLang drives it; ``first`` [B, V] was drafted in the step before.

    ``offered``: what its loop chooses from the logits behind the first layer.
    """
    gate.begin(slots)
    batch, of, width = len(slots), first, 1
    for step in range(layers):
        token, prob = offered(of) if step else choices(of)
        token = token if token_map is None else token_map[token]
        gate.add(*(values.view(batch, width, SHAPE.topk) for values in (token, prob)))
        if step < layers - 1:
            width = SHAPE.topk
            of = logits(batch * width, seed + step)
            gate.observe(of, token_map=token_map)
    return gate.finish()


def finished(gate: TreeGate, slots: Tensor, first: Tensor) -> Trees:
    return gate.finalize(*run_step(gate, slots, first), ROOTS)


# -- the first layer is measured in the step before ---------------------------------------


@pytest.mark.parametrize("enter", ["join", "relay_first_token"])
def test_tree_gate_relays_first_layers_by_slot(enter: str) -> None:
    """By slot, whatever places the requests have in the next batch; one row per child."""
    policy: Any = Scripted(needs=frozenset({"margin", "entropy_top4", "state"}))
    policy.measure = lambda _logits, hidden: {"state": hidden}
    gate = gate_of(policy)
    first, hidden = logits(3, 0), torch.arange(6.0).view(3, 2)
    getattr(gate, enter)(torch.tensor([6, 2, 4]), first, hidden)
    gate.begin(torch.tensor([4, 6]))
    here = first[[2, 0]]
    token, prob = choices(here)
    gate.add(token[:, None], prob[:, None])
    (layer,) = policy.seen
    said = measure(here, ["entropy_top4"])
    assert torch.equal(layer.entropy, said["entropy"][:, None, None].expand(-1, 1, SHAPE.topk))
    measured = layer.nodes.measured
    assert torch.equal(measured["margin"], node_margins(prob))
    assert torch.equal(measured["entropy_top4"], said["entropy_top4"].repeat_interleave(3))
    assert torch.equal(measured["state"], hidden[[2, 0]].repeat_interleave(3, dim=0))
    assert torch.equal(layer.nodes.prob, prob.flatten())


def test_tree_gate_unmeasured_first_layer_counts_as_certain() -> None:
    """Its prefill ran on another server; the gate stays open."""
    policy = Scripted()
    gate = gate_of(policy)
    run_step(gate, torch.tensor([3]), logits(1, 0))
    assert policy.seen[0].entropy.unique().tolist() == [0.0]
    judged = gate_of(gated("c2t"))
    assert judged.program is not None
    judged.program.set_beta(1.0)
    trees, _ = run_step(judged, torch.tensor([3]), logits(1, 0))
    assert (trees.depth == 1).sum() == SHAPE.topk


# -- what is verified ---------------------------------------------------------------------


def eagle2_trees(slots: Tensor, first: Tensor) -> LinkedTrees:
    """EAGLE-2's trees of the same draft."""
    gate = gate_of(EAGLE2())
    gate.join(slots, first)
    return finished(gate, slots, first)


def same(left: Trees, right: Trees) -> bool:
    names = [field.name for field in fields(Trees)]
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def test_tree_gate_ranks_draft_while_rank_0_does() -> None:
    """Whether a layer is forwarded at all must be the same everywhere."""
    for mine, theirs in ((False, True), (True, False)):
        gate = gate_of(
            Scripted(keep=mine), agree=lambda alive, theirs=theirs: torch.full_like(alive, theirs)
        )
        gate.begin(torch.tensor([1, 5]))
        add_first(gate, logits(2, 0))
        assert gate.any_alive() == theirs


@pytest.mark.parametrize("max_rows", [1, 2, 7, 12, 100])
def test_tree_gate_cuts_a_batch_to_max_rows(max_rows: int) -> None:
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    gate = gate_of(EAGLE2(), max_rows=max_rows)
    drafted, keys = run_step(gate, slots, first)
    trees = gate.finalize(drafted, keys, ROOTS)
    assert same(trees, cut(drafted.rooted(ROOTS), within_budget(drafted, keys, max_rows)))
    assert int(trees.num_nodes.sum()) == min(max(max_rows, 2), 18)


def test_tree_gate_ranks_take_the_trees_of_rank_0_in_one_message() -> None:
    """Shape and tokens: a rank that drafted anything else must verify rank 0's trees."""
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    theirs = eagle2_trees(slots, logits(2, 9))
    messages: list[Tensor] = []

    def agree(mine: Tensor) -> Tensor:
        assert mine.dtype == torch.int64
        messages.append(mine)
        return torch.stack([getattr(theirs, name) for name in (*PLANES, *LINKS)])

    gate = gate_of(Scripted(keep=False), max_rows=4, agree=agree)
    gate.join(slots, first)
    assert same(finished(gate, slots, first), theirs)
    assert len(messages) == 1


# -- with a kernel program ----------------------------------------------------------------

#: Thresholds that prune some of the trees below.
BETAS = {"c2t": 0.8, "c2t-log": 0.1, "c2t-plus": 0.1, "dyjoint": 0.1, "dymax": 0.3}
GATES = {
    name + how: C2TConfig(policy=name + how, beta=beta)
    for name, beta in BETAS.items()
    for how in ("", "-eagle2")
}
#: And trees that ask no gate.
OTHERS = {"eagle2": C2TConfig("eagle2")}


def gated(name: str) -> TreePolicy:
    return build_tree_policy((GATES | OTHERS)[name])


def fused(policy: TreePolicy, **options: Any) -> TreeGate:
    """A gate that asks the policy's program, here the kernel's twin."""
    gate = gate_of(policy, **options)
    assert gate.served.program is not None
    return gate


def nonsense(of: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates of SGLang's loop after a program's first layer."""
    none = torch.full((len(of), SHAPE.topk), -1)
    return none, none.float()


@pytest.mark.parametrize("name", [*GATES, *OTHERS])
def test_tree_gate_program_grows_the_trees_of_its_policy(name: str) -> None:
    """After the first layer from the draft logits alone, over steps of other requests.

    It speaks of the target's tokens, also where the draft has a vocabulary of its own.
    """
    gates = fused(gated(name)), gate_of(in_torch(gated(name)))
    sizes, deepest, own_vocabulary = set(), 0, torch.arange(VOCAB) * 7 + 100
    for seed, slots in enumerate(([1, 5], [5, 3], [0, 1])):
        here, first = torch.tensor(slots), 2 * logits(2, seed)
        done = []
        for gate in gates:
            gate.relay_first_token(here, first)
            offered = nonsense if gate.program is not None else choices
            how = {"offered": offered, "token_map": own_vocabulary if seed else None}
            done.append(run_step(gate, here, first, seed=10 * seed, **how))
        (mine, my_keys), (theirs, their_keys) = done
        assert same(mine, theirs)
        torch.testing.assert_close(my_keys, their_keys, rtol=1e-5, atol=1e-5)
        assert [layer.depth for layer in gates[0].layers] == [1, 2, 3]
        sizes |= set(mine.num_nodes.tolist())
        deepest = max(deepest, int(mine.depth.max()) if seed else 0)
    assert len(sizes) > 1 or name in OTHERS, "no choice"
    assert deepest > 1, "no token of a program's own choice"


def test_tree_gate_policy_sees_the_measurements_of_the_program() -> None:
    """The same numbers that torch measures, in the first layer too, and the program's verdict."""
    policy: Any = gated("c2t-plus")
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    gates = fused(policy), gate_of(in_torch(policy))
    for gate in gates:
        gate.join(slots, first)
        run_step(gate, slots, first)
    for mine, theirs in zip(*(gate.layers for gate in gates), strict=True):
        for name in ("prob", "joint", "entropy", "alive"):
            torch.testing.assert_close(getattr(mine.nodes, name), getattr(theirs.nodes, name))
        told, measured = mine.nodes.measured, theirs.nodes.measured
        close = {"rtol": 1e-5, "atol": 1e-5}
        assert "confidence" not in measured
        torch.testing.assert_close(
            told["confidence"], policy.gate.confidence(theirs.nodes), **close
        )
        alive = mine.nodes.alive
        assert torch.equal(told["keep"] & alive, (told["confidence"] >= policy.gate.beta) & alive)


def test_tree_gate_exploration_steps_verify_eagle2s_tree_measured_in_torch() -> None:
    """Whatever the policy keeps and the budget is, so that labels are uncensored."""
    slots, first = torch.tensor([1, 5]), logits(2, 0)
    explored: Any = {"exploration": Scheduled(True, False, True, names=MORE), "max_rows": 3}
    again: Any = {**explored, "exploration": Scheduled(True, False, True, names=MORE)}
    gate, plain = fused(gated("dyjoint"), **explored), gate_of(in_torch(gated("dyjoint")), **again)
    for each in (gate, plain):
        each.join(slots, first)
        assert each.exploring
        assert each.program is None
        assert each.first_tokens_complete(slots).all()
        trees = finished(each, slots, first)
        assert same(trees, eagle2_trees(slots, first))
        assert trees.num_nodes.tolist() == [SHAPE.num_draft_tokens] * 2
    for mine, theirs in zip(gate.layers, plain.layers, strict=True):
        assert mine.nodes.measured.keys() == theirs.nodes.measured.keys() >= MORE
        for name, values in mine.nodes.measured.items():
            assert torch.equal(values, theirs.nodes.measured[name])
    for each in (gate, plain):
        each.relay_first_token(slots, first)
    assert gate.program is not None
    assert same(finished(gate, slots, first), finished(plain, slots, first))
    assert "margin" not in plain.layers[0].nodes.measured


# -- SGLang's loop ------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_tree_drafter_program_offers_k_numbers_to_sglangs_loop(kept: bool) -> None:
    """And forwards nothing once no tree grows: the choices there are of no vocabulary."""
    tree_draft = pytest.importorskip("sglang_c2t.srt.draft.tree")
    gate = fused(GatedTree(DyJoint(0.0 if kept else 1.1)))
    slots, first, hidden = torch.tensor([1, 5]), logits(2, 0), torch.rand(6, 4)
    gate.join(slots, first)
    gate.begin(slots)
    add_first(gate, first)

    host = SimpleNamespace(
        num_slots=8, num_steps=2, capturing=False, token_map=torch.arange(VOCAB) + 50
    )
    batch = double(
        "ForwardBatch",
        input_ids=torch.zeros(6, dtype=torch.int64),
        spec_info=double("sglang.srt.speculative.eagle_info.EagleDraftInput", hidden_states=hidden),
    )
    forwarded = double(
        "LogitsProcessorOutput", next_token_logits=logits(6, 1), hidden_states=hidden
    )
    ran = double(
        "sglang.srt.model_executor.model_runner.ModelRunnerOutput", logits_output=forwarded
    )
    layer = tree_draft.DraftForward(batch, lambda: ran)
    tree_draft.TreeDrafter(host, gate)._score(layer)
    assert layer.output.logits_output.next_token_logits.shape == (6, SHAPE.topk)
    assert layer.output.logits_output.hidden_states is hidden
    gate.add(*(values.view(2, 3, 3) for values in nonsense(torch.zeros(6, 1))))
    if kept:
        expected = choices(logits(6, 1))[0].view(2, 9) + 50
        drafted = gate.finish()[0]
        for request in range(2):
            deep = drafted.tokens[request][drafted.depth[request] == 2]
            assert set(deep.tolist()) <= set(expected[request].tolist())
            assert len(deep)


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["c2t-log", "c2t-log-eagle2"])
def test_tree_gate_switch_of_the_threshold_counts_from_the_next_step_on(
    name: str, captured: bool
) -> None:
    """A captured graph too: the threshold is read from memory, in every layer."""
    slots, first = torch.tensor([3, 1]), logits(2, 1)

    def tree_policy(beta: float) -> TreePolicy:
        return build_tree_policy(C2TConfig(policy=name, beta=beta))

    gate, fresh = fused(tree_policy(0.9)), fused(tree_policy(0.001))
    before = relayed_step(gate, slots, first)
    gate.switch(tree_policy(0.001), captured=captured)
    assert same(relayed_step(gate, slots, first), relayed_step(fresh, slots, first))
    assert not same(before, relayed_step(fresh, slots, first))


def test_tree_gate_switch_in_cuda_graphs_keeps_the_growth_rule() -> None:
    gate = fused(gated("c2t-log"))
    for other in ("c2t-log-eagle2", "eagle2"):
        with pytest.raises(ConfigError, match="grows trees by another rule"):
            gate.switch(build_tree_policy(C2TConfig(policy=other)), captured=True)
    gate.switch(build_tree_policy(C2TConfig(policy="eagle2")), captured=False)
    slots, first = torch.tensor([3, 1]), logits(2, 1)
    assert same(relayed_step(gate, slots, first), eagle2_trees(slots, first))


@pytest.mark.parametrize("program", [False, True])
def test_tree_gate_opt_out_gets_eagle2s_tree(program: bool) -> None:
    slots, first = torch.tensor([3, 1]), logits(2, 1)
    gate = fused(gated("c2t-log")) if program else gate_of(in_torch(gated("c2t-log")))
    alone = relayed_step(gate, slots, first)
    gate.opt_outs.admit([1], [True])
    both, whole = relayed_step(gate, slots, first), eagle2_trees(slots, first)
    assert both.num_nodes.tolist() == [alone.num_nodes[0], whole.num_nodes[1]]
    assert torch.equal(both.tokens[0], alone.tokens[0])
    assert torch.equal(both.tokens[1], whole.tokens[1])
    gate.opt_outs.admit([1], [False])
    assert same(relayed_step(gate, slots, first), alone)


def test_tree_gate_planned_trees_ignore_opt_out() -> None:
    """A planner keeps opt-outs whole, and the server verifies the selected nodes."""
    slots, first = torch.tensor([3, 1]), logits(2, 1)
    gate = fused(build_tree_policy(C2TConfig(policy="auto")))
    assert gate.planned
    alone = relayed_step(gate, slots, first)
    gate.opt_outs.admit([1], [True])
    assert same(relayed_step(gate, slots, first), alone)
    drafted, keys = run_step(gate, slots, first, layers=1)
    assert drafted.num_nodes.tolist() == [1 + SHAPE.topk] * 2
    chosen = torch.tensor([[True, False, True, *[False] * 5], [False] * 8])
    trees = gate.finalize(drafted, keys, ROOTS, chosen)
    assert trees.num_nodes.tolist() == [3, 1]
    assert trees.tokens[0, :3].tolist() == [ROOTS[0], *drafted.tokens[0, [1, 3]]]


def relayed_step(gate: TreeGate, slots: Tensor, first: Tensor) -> Trees:
    """A step behind its first layer's measurement."""
    gate.join(slots, first)
    return finished(gate, slots, first)


def test_tree_gate_refuses_a_policy_that_does_not_fit_the_shape() -> None:
    with pytest.raises(ConfigError, match="width 4 needs --speculative-eagle-topk 4"):
        gate_of(Fork(4))

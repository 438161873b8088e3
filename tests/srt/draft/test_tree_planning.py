"""What a server of trees tells its planner, and which nodes it verifies of what was drafted."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.draft.slots import FirstLayer
from sglang_c2t.kernels.rows import indptr
from sglang_c2t.plan.plan import Plan
from sglang_c2t.plan.planner import Choice
from sglang_c2t.plan.trees import TreePlanner
from sglang_c2t.policies.gated_tree import PlannedTree
from sglang_c2t.srt.draft.tree_planning import TreePlanning
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.tree import TreeVerifyInput, build_verify_input
from sglang_c2t.tree import LinkedTrees, Trees, cut
from tests import oracles
from tests.draft.own_rules import ByMark
from tests.draft.test_growth import Draft, drafts, grown

SLOTS = 8


class Scripted(TreePlanner):
    """Chooses what the test says, and remembers what it is told."""

    def __init__(self, draft: Draft, layers: int, rows: int, whole: int | None = None) -> None:
        super().__init__(*draft.shape)
        self.plan = Plan(layers, rows, 1.0, 1.0, draft.width or draft.topk)
        self.whole = whole
        self.first: list[Any] = []
        self.told: tuple[Any, ...] = ()

    def choose(self, first: Any, *_args: Any, **_kwargs: Any) -> Choice:
        self.first = first.tolist()
        return Choice(self.plan, "plan", self.whole)

    def settle(self, *_args: Any) -> Plan:
        return self.plan

    def learn_nodes(self, *told: Any, constrained: bool = False) -> None:
        self.told = told


def begun(planner: TreePlanner, draft: Draft, first: torch.Tensor | None = None) -> TreePlanning:
    planning = TreePlanning(
        planner, tiers=lambda: None, width=draft.max_nodes, slots=SLOTS, device="cpu"
    )
    known = torch.full((draft.topk, draft.batch), 0.5) if first is None else first
    planning.begin(draft.batch, lambda: FirstLayer(known[0], known, known))
    return planning


def roomy(draft: Draft) -> bool:
    return draft.topk > 1 and draft.max_nodes > draft.topk


def wide_or_narrow(draft: Draft) -> st.SearchStrategy[Draft]:
    return st.sampled_from([draft, replace(draft, width=1)])


roomy_drafts = drafts().filter(roomy).flatmap(wide_or_narrow)


@given(roomy_drafts, st.integers(1, 4), st.integers(0, 2**20), st.booleans())
def test_the_best_nodes_of_a_batch_get_the_rows_and_who_wants_all_gets_all(
    draft: Draft, layers: int, seed: int, explores: bool
) -> None:
    """Exactly as many as planned, no node without its parent, and none better was left out."""
    rng = random.Random(seed)
    layers = min(layers, draft.steps)
    run = grown(draft, PlannedTree(ByMark()), layers)
    each = Scripted(draft, layers, 0).full_rows(layers, draft.width or draft.topk) - 1
    rows = rng.randint(draft.batch, draft.batch * draft.max_nodes)
    planner = Scripted(draft, layers, rows, rng.randrange(draft.batch) if explores else None)
    planning = begun(planner, draft)
    wants_all = {b for b in range(draft.batch) if rng.random() < 0.3}
    chosen, total = planning.choose_nodes(run.trees, run.keys, layers, sorted(wants_all))
    if planner.whole is not None:
        wants_all.add(planner.whole)
    assert draft.batch + int(chosen.sum()) == total
    others = draft.batch - len(wants_all)
    budget = min(max(rows - draft.batch - each * len(wants_all), 0), others * each)
    survivals, kept = [], []
    for b in range(draft.batch):
        parents = run.trees.parents[b].tolist()
        nodes = [node for node in range(1, draft.max_nodes) if parents[node] >= 0]
        assert len(nodes) == each, "the host knows how many there are"
        taken = {0, *(node for node in nodes if chosen[b, node - 1])}
        assert {parents[node] for node in taken - {0}} <= taken
        assert not chosen[b, each:].any(), "padding"
        if b in wants_all:
            assert len(taken) == 1 + each
            continue
        worth = [
            float(planner.survival(run.trees.depth[b, node].item(), run.keys[b, node].item()))
            for node in range(draft.max_nodes)
            if parents[node] >= 0
        ]
        worth = [
            min(worth[up - 1] for up in oracles.ancestors(parents, node) if up) for node in nodes
        ]
        survivals += worth
        kept += [value for node, value in zip(nodes, worth, strict=True) if node in taken]
    assert len(kept) == budget
    assert np.allclose(sorted(kept), sorted(survivals)[len(survivals) - budget :], atol=1e-5)


@given(roomy_drafts, st.integers(0, 2**20))
def test_a_node_survived_if_it_lies_on_the_accepted_path(draft: Draft, seed: int) -> None:
    """Labels are those of the verified nodes, in the tree as it was drafted."""
    rng = random.Random(seed)
    run = grown(draft, PlannedTree(ByMark()))
    planner = Scripted(draft, draft.steps, rng.randint(draft.batch, draft.batch * draft.max_nodes))
    planning = begun(planner, draft)
    chosen, total = planning.choose_nodes(run.trees, run.keys, draft.steps)
    # Every token is another, so that it names its node.
    trees = named(run.trees)
    verified = cut(trees, chosen)
    verify_input, paths = accepted(verified, total, draft, rng)
    planning.verified(verify_input, torch.tensor([len(path) for path in paths]))
    planning.begin(draft.batch, lambda: FirstLayer(*[torch.full((draft.topk, 1), 0.5)] * 3))
    width, layers, depth, least, told_chosen, survived = planner.told
    assert (width, layers) == (draft.width or draft.topk, draft.steps)
    assert depth.tolist() == run.trees.depth[:, 1:].tolist()
    live = depth > 0
    assert least[live].tolist() == run.keys[:, 1:][torch.tensor(live)].tolist()
    assert told_chosen.tolist() == chosen.tolist()
    for b, path in enumerate(paths):
        of_path = [int(verified.tokens[b, node]) for node in path[1:]]
        assert trees.tokens[b, 1:][torch.tensor(survived[b] > 0)].tolist() == of_path


def named(trees: Trees) -> Trees:
    tokens = torch.arange(trees.tokens.numel()).view_as(trees.tokens)
    return Trees(tokens, trees.parents, trees.depth, trees.num_nodes, trees.source)


def accepted(
    trees: Trees, total: int, draft: Draft, rng: random.Random
) -> tuple[TreeVerifyInput, list[list[int]]]:
    """A verification that accepted a path of each tree, and those paths' nodes."""
    shape: Any = {"parents": trees.parents, "num_steps": draft.steps}
    packing = Packing(trees.num_nodes, draft.max_nodes, total=total, **shape)
    batch = SimpleNamespace(seq_lens=torch.zeros(draft.batch))
    verify_input = build_verify_input(
        LinkedTrees.of(trees), batch, num_steps=draft.steps, topk=draft.topk, packing=packing
    )
    paths = [
        sorted(oracles.ancestors(parents[:size], rng.randrange(size)))
        for parents, size in zip(trees.parents.tolist(), trees.num_nodes.tolist(), strict=True)
    ]
    packing.layout = SimpleNamespace(row_starts=indptr(packing.num_rows, draft.batch))
    index = torch.full((draft.batch, draft.steps + 1), -1, dtype=torch.int32)
    for b, path in enumerate(paths):
        index[b, : len(path)] = packing.layout.row_starts[b] + torch.tensor(path)
    verify_input.paths = SimpleNamespace(accept_index=index)
    return verify_input, paths


def test_what_is_known_of_first_layers_is_their_confidences_the_best_first() -> None:
    draft = Draft(0, topk=3, steps=2, batch=2, max_nodes=6)
    planner = Scripted(draft, 1, 4)
    begun(planner, draft, torch.tensor([[0.25, 0.5], [0.75, 0.0], [0.5, 0.25]]))
    assert planner.first == [[0.75, 0.5, 0.25, 0.0, 0.0], [0.5, 0.25, 0.0, 0.0, 0.0]]

"""A server of trees reports steps to its planner, and verifies the planned nodes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.kernels.rows import indptr
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord
from sglang_c2t.plan.trees import TreePlanner
from sglang_c2t.policies.gated_tree import PlannedTree
from sglang_c2t.srt.draft.planning import Planning, Step
from sglang_c2t.srt.draft.selection import TreeSelector
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.tree import TreeVerifyInput, build_verify_input
from sglang_c2t.tree import LinkedTrees, Trees, cut
from tests import oracles
from tests.draft.own_rules import ByMark
from tests.draft.test_growth import Draft, drafts, grown


class Scripted(TreePlanner):
    """Plans what the test says, and remembers what it learns."""

    def __init__(self, draft: Draft, layers: int, rows: int, full: int | None = None) -> None:
        super().__init__(*draft.shape)
        self.next = StepPlan(StepKind.PLANNED, layers, draft.topk, rows, full)
        self.records: list[StepRecord] = []

    def plan(self, batch: BatchView) -> StepPlan:
        return self.next

    def learn(self, record: StepRecord) -> None:
        self.records.append(record)


def begun(planner: TreePlanner, draft: Draft) -> tuple[Planning, Step]:
    selector = TreeSelector(planner, width=draft.max_nodes, device="cpu")
    planning = Planning(planner, selector, tiers=lambda: None, width=draft.max_nodes, device="cpu")
    return planning, planning.begin(draft.batch)


def roomy(draft: Draft) -> bool:
    return draft.topk > 1 and draft.max_nodes > draft.topk


roomy_drafts = drafts().filter(roomy)


@given(roomy_drafts, st.integers(1, 4), st.integers(0, 2**20), st.booleans())
def test_tree_planning_gives_rows_to_the_best_nodes(
    draft: Draft, layers: int, seed: int, explores: bool
) -> None:
    """Exactly as many as planned, no node without its parent, and none better was left out."""
    rng = random.Random(seed)
    layers = min(layers, draft.steps)
    run = grown(draft, PlannedTree(ByMark()), layers)
    each = Scripted(draft, layers, 0).full_rows(layers) - 1
    rows = rng.randint(draft.batch, draft.batch * draft.max_nodes)
    planner = Scripted(draft, layers, rows, rng.randrange(draft.batch) if explores else None)
    planning, step = begun(planner, draft)
    wants_all = {b for b in range(draft.batch) if rng.random() < 0.3}
    step.full = sorted(wants_all)
    chosen, total = planning.selector.select(step, run.trees, run.keys)
    if planner.next.full_draft_of is not None:
        wants_all.add(planner.next.full_draft_of)
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
def test_tree_planning_learns_nodes_of_the_accepted_path(draft: Draft, seed: int) -> None:
    """Labels are those of the verified nodes, in the tree as it was drafted."""
    rng = random.Random(seed)
    run = grown(draft, PlannedTree(ByMark()))
    planner = Scripted(draft, draft.steps, rng.randint(draft.batch, draft.batch * draft.max_nodes))
    planning, step = begun(planner, draft)
    chosen, total = planning.selector.select(step, run.trees, run.keys)
    # Every token is another, so that it names its node.
    trees = named(run.trees)
    verified = cut(trees, chosen)
    verify_input, paths = accepted(verified, total, draft, rng)
    planning.finish(step, verify_input, torch.tensor([len(path) for path in paths]))
    planning._last.forwards = -1  # something else was forwarded: there are no times
    planning.begin(draft.batch)
    (record,) = planner.records
    depth, least, verified_nodes, survived = record.outcome
    assert record.plan.num_layers == draft.steps
    assert depth.tolist() == run.trees.depth[:, 1:].tolist()
    live = depth > 0
    assert least[live].tolist() == run.keys[:, 1:][torch.tensor(live)].tolist()
    assert verified_nodes.tolist() == chosen.tolist()
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

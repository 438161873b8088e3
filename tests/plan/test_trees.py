"""The planner of trees alongside made-up trees whose survival and costs are known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.step import BatchView, StepPlan, StepRecord, StepTimes
from sglang_c2t.plan.trees import TreePlanner, by_layer

TOPK, DEPTH, NODES = 2, 4, 10


@dataclass
class Batch:
    """Trees as drafted, [B, N - 1] each: where nodes hang, depths, least confidences on paths."""

    parents: np.ndarray
    depth: np.ndarray
    least: np.ndarray


@dataclass
class MadeUpServer:
    """Serves B requests: grows trees by confidence, verifies the best nodes, takes its time.

    A node whose least confidence is c survives with probability c ** 2.
    """

    batch: int
    row_ms: float = 1.0
    layer_ms: float = 4.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def trees(self, layers: int) -> Batch:
        """K children of the root, then of each of the K best of a layer; the best N - 1 of all."""
        made = Batch(*(np.zeros((self.batch, NODES - 1)) for _ in range(3)))
        for request in range(self.batch):
            ease = self.rng.uniform(0.3, 1.0)
            nodes = [(-1, 1, self.confidence(ease)) for _ in range(TOPK)]
            rows = sorted(range(TOPK), key=lambda n: -nodes[n][2])[:TOPK]
            for depth in range(2, layers + 1):
                first = len(nodes)
                for parent in rows:
                    nodes += [
                        (parent, depth, min(nodes[parent][2], self.confidence(ease)))
                        for _ in range(TOPK)
                    ]
                rows = sorted(range(first, len(nodes)), key=lambda n: -nodes[n][2])[:TOPK]
            best = sorted(sorted(range(len(nodes)), key=lambda n: -nodes[n][2])[: NODES - 1])
            for place, node in enumerate(best):
                parent, made.depth[request, place], made.least[request, place] = nodes[node]
                made.parents[request, place] = best.index(parent) if parent >= 0 else -1
        return made

    def confidence(self, ease: float) -> float:
        return float(self.rng.uniform() ** (0.3 / ease))

    def tiers(self) -> list[int]:
        return list(range(self.batch, self.batch * NODES + 1))

    def view(self) -> BatchView:
        return BatchView(self.batch, self.tiers(), range(1, DEPTH + 1), allows_uniform=False)

    def serve(self, planner: TreePlanner, steps: int) -> list[StepPlan]:
        """So many steps."""
        plans = []
        for _ in range(steps):
            plan = planner.plan(self.view())
            trees = self.trees(plan.num_layers)
            chosen = self.chosen(planner, trees, plan.row_budget - self.batch)
            outcome = trees.depth.astype(int), trees.least, chosen, chosen & self.survives(trees)
            draft_ms = self.layer_ms * (plan.num_layers - 1)
            verify_ms = 30.0 + self.row_ms * plan.row_budget
            times = StepTimes(plan.row_budget, verify_ms, draft_ms, verify_ms + draft_ms)
            planner.learn(StepRecord(plan, self.batch, outcome=outcome, times=times))
            plans.append(plan)
        return plans

    def survives(self, trees: Batch) -> np.ndarray:
        """One number of a request decides for all its nodes: none outlives its parent."""
        return self.rng.uniform(size=(self.batch, 1)) < trees.least**2

    def chosen(self, planner: TreePlanner, trees: Batch, drafts: int) -> np.ndarray:
        survival = np.where(
            trees.depth > 0, planner.survival(np.maximum(trees.depth, 1), trees.least), -1.0
        )
        best = np.argsort(-survival, axis=None, kind="stable")[:drafts]
        return np.isin(np.arange(survival.size), best).reshape(survival.shape) & (trees.depth > 0)


def test_tree_planner_learns_survival_from_the_least_confidence_on_a_path() -> None:
    planner = TreePlanner(TOPK, DEPTH, NODES)
    MadeUpServer(8, row_ms=0.01).serve(planner, 600)
    confidence = np.array([0.3, 0.5, 0.8])
    for depth in range(1, DEPTH + 1):
        assert planner.survival(depth, confidence) == pytest.approx(confidence**2, abs=0.12)
    assert max(planner.calibration_errors()) < 0.1


def test_tree_planner_uses_cheap_rows_and_layers() -> None:
    cheap, dear = MadeUpServer(4, 0.001, 0.001), MadeUpServer(4, 30.0, 300.0)
    planner = TreePlanner(TOPK, DEPTH, NODES)
    cheap.serve(planner, 100)
    plans = cheap.serve(planner, 60)
    assert np.mean([plan.num_layers == DEPTH for plan in plans]) > 0.9
    assert np.mean([plan.row_budget for plan in plans]) > 0.9 * 4 * NODES
    planner = TreePlanner(TOPK, DEPTH, NODES)
    dear.serve(planner, 100)
    plans = dear.serve(planner, 60)
    assert np.mean([plan.num_layers == 1 for plan in plans]) > 0.9
    assert np.mean([plan.row_budget for plan in plans]) < 2 * 4


def test_tree_planner_uniform_plan_is_the_best_full_tree() -> None:
    planner = TreePlanner(TOPK, DEPTH, NODES)
    server = MadeUpServer(4, row_ms=0.001)
    server.serve(planner, 100)
    survival = planner._expected(server.view())
    found = planner._best_uniform(survival, replace(server.view(), allows_uniform=True))
    assert found.rows == 4 * planner.full_rows(found.layers)
    for layers in range(1, DEPTH + 1):
        each = planner.full_rows(layers)
        nodes = np.sort(survival[:, :layers].reshape(len(survival), -1), axis=1)[:, 1 - each :]
        took = planner.cost.one(4 * each, 4, layers, uniform=True)
        assert found.rate >= 4 * (1 + nodes.sum(axis=1).mean()) / took - 1e-9


def tree_of(trees: Batch) -> tuple[np.ndarray, np.ndarray]:
    return trees.depth, trees.least


@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 40))
def test_tree_planner_full_rows_count_the_nodes(topk: int, layers: int, most: int) -> None:
    rows, nodes = 1, 1
    for _ in range(layers):
        nodes += rows * topk
        rows = min(rows * topk, topk)
    assert TreePlanner(topk, 5, most).full_rows(layers) == min(nodes, most)


@given(st.integers(0, 2**32 - 1), st.integers(1, DEPTH))
def test_tree_planner_survival_falls_by_layer(seed: int, layers: int) -> None:
    server = MadeUpServer(3, rng=np.random.default_rng(seed))
    planner = TreePlanner(TOPK, DEPTH, NODES)
    trees = server.trees(layers)
    most = planner.layer_nodes
    seen = by_layer(*tree_of(trees), layers, most)
    for request in range(3):
        for layer in range(layers):
            there = sorted(trees.least[request, trees.depth[request] == layer + 1], reverse=True)
            there += [0.0] * (most - len(there))
            assert seen[request, layer].tolist() == there
    survival = planner.survivals(seen)
    assert ((survival > 0) == (seen > 0)).all()
    assert (np.diff(survival, axis=2) <= 0).all()
    assert (np.diff(survival[..., 0], axis=1) <= 0).all()

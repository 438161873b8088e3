"""The planner of trees beside made-up trees whose survival and costs are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.planner import Choice
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
    wide_ms: float = 0.0
    """Of a layer, for each row of a request behind the first."""
    widths: tuple[int, ...] | None = (TOPK,)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def trees(self, layers: int, width: int = TOPK) -> Batch:
        """K children of the root, then of each of the W best of a layer; the best N - 1 of all."""
        made = Batch(*(np.zeros((self.batch, NODES - 1)) for _ in range(3)))
        for request in range(self.batch):
            ease = self.rng.uniform(0.3, 1.0)
            nodes = [(-1, 1, self.confidence(ease)) for _ in range(TOPK)]
            rows = sorted(range(TOPK), key=lambda n: -nodes[n][2])[:width]
            for depth in range(2, layers + 1):
                first = len(nodes)
                for parent in rows:
                    nodes += [
                        (parent, depth, min(nodes[parent][2], self.confidence(ease)))
                        for _ in range(TOPK)
                    ]
                rows = sorted(range(first, len(nodes)), key=lambda n: -nodes[n][2])[:width]
            best = sorted(sorted(range(len(nodes)), key=lambda n: -nodes[n][2])[: NODES - 1])
            for place, node in enumerate(best):
                parent, made.depth[request, place], made.least[request, place] = nodes[node]
                made.parents[request, place] = best.index(parent) if parent >= 0 else -1
        return made

    def confidence(self, ease: float) -> float:
        return float(self.rng.uniform() ** (0.3 / ease))

    def tiers(self) -> list[int]:
        return list(range(self.batch, self.batch * NODES + 1))

    def serve(self, planner: TreePlanner, steps: int) -> tuple[list[Choice], list[int]]:
        """So many steps: what was chosen, and how many rows were verified."""
        choices, all_rows = [], []
        for _ in range(steps):
            first = -np.sort(-self.trees(1).least[:, :TOPK], axis=1)
            first = np.pad(first, ((0, 0), (0, planner.layer_nodes(TOPK) - TOPK)))
            choice = planner.choose(first, self.batch, self.tiers(), widths=self.widths)
            layers, width = choice.plan.layers, choice.plan.width
            trees = self.trees(layers, width)
            seen = planner.by_layer(trees.depth, trees.least, width, layers)
            rows = planner.settle(seen, self.tiers(), width).rows
            chosen = self.chosen(planner, trees, rows - self.batch)
            planner.learn_nodes(width, layers, trees.depth.astype(int), trees.least, chosen, chosen
                                & self.survives(trees))  # fmt: skip
            draft_ms = (self.layer_ms + self.wide_ms * (width - 1)) * (layers - 1)
            verify_ms = 30.0 + self.row_ms * rows
            planner.learn_time(
                choice.plan, rows=rows, batch=self.batch, verify_ms=verify_ms, draft_ms=draft_ms,
                step_ms=verify_ms + draft_ms,
            )  # fmt: skip
            choices.append(choice)
            all_rows.append(rows)
        return choices, all_rows

    def survives(self, trees: Batch) -> np.ndarray:
        """One number of a request decides for all its nodes: none outlives its parent."""
        return self.rng.uniform(size=(self.batch, 1)) < trees.least**2

    def chosen(self, planner: TreePlanner, trees: Batch, drafts: int) -> np.ndarray:
        survival = np.where(
            trees.depth > 0, planner.survival(np.maximum(trees.depth, 1), trees.least), -1.0
        )
        best = np.argsort(-survival, axis=None, kind="stable")[:drafts]
        return np.isin(np.arange(survival.size), best).reshape(survival.shape) & (trees.depth > 0)


def test_survival_is_learnt_by_depth_from_the_least_confidence_on_a_path() -> None:
    planner = TreePlanner(TOPK, DEPTH, NODES)
    MadeUpServer(8, row_ms=0.01).serve(planner, 600)
    confidence = np.array([0.3, 0.5, 0.8])
    for depth in range(1, DEPTH + 1):
        assert planner.survival(depth, confidence) == pytest.approx(confidence**2, abs=0.12)
    assert max(planner.calibration_errors()) < 0.1


def test_cheap_rows_and_layers_are_used_and_dear_ones_are_not() -> None:
    cheap, dear = MadeUpServer(4, 0.001, 0.001), MadeUpServer(4, 30.0, 300.0)
    planner = TreePlanner(TOPK, DEPTH, NODES)
    cheap.serve(planner, 60)
    choices, rows = cheap.serve(planner, 60)
    assert {choice.plan.layers for choice in choices} == {DEPTH}
    assert np.mean(rows) > 0.9 * 4 * NODES
    planner = TreePlanner(TOPK, DEPTH, NODES)
    dear.serve(planner, 60)
    choices, rows = dear.serve(planner, 60)
    assert np.mean([choice.plan.layers == 1 for choice in choices]) > 0.9
    assert np.mean(rows) < 2 * 4


@pytest.mark.parametrize(("wide_ms", "width"), [(0.0, TOPK), (40.0, 1)])
def test_wide_layers_are_drafted_where_they_cost_little(wide_ms: float, width: int) -> None:
    server = MadeUpServer(4, 0.1, wide_ms=wide_ms, widths=None)
    planner = TreePlanner(TOPK, DEPTH, NODES)
    server.serve(planner, 300)
    choices, _ = server.serve(planner, 200)
    planned = [choice.plan for choice in choices if choice.reason == "plan"]
    # A first layer comes with draft extend, however wide.
    assert np.mean([plan.width == width or plan.layers == 1 for plan in planned]) > 0.9
    assert {choice.plan.width for choice in choices} == {1, TOPK}, "the other is looked at"
    of_one_layer = [choice.plan.width for choice in choices if choice.plan.layers == 1]
    assert set(of_one_layer) <= {1}, "which is the same at any width"
    assert len(planned) > 170, "seldom"


def test_a_width_that_cannot_be_drafted_is_not_chosen() -> None:
    choices, _ = MadeUpServer(4, wide_ms=100.0).serve(TreePlanner(TOPK, DEPTH, NODES), 100)
    assert {choice.plan.width for choice in choices} == {TOPK}


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, DEPTH), st.sampled_from([1, 2]))
def test_rows_are_as_many_as_trying_every_number_finds_best(
    seed: int, batch: int, layers: int, width: int
) -> None:
    server = MadeUpServer(batch, rng=np.random.default_rng(seed))
    planner = TreePlanner(TOPK, DEPTH, NODES)
    for _ in range(10):
        planner.learn_time(
            planner._everything(batch), rows=NODES, batch=batch, verify_ms=20.0, draft_ms=3.0,
            step_ms=25.0,
        )  # fmt: skip
    server.serve(planner, 30)
    trees = server.trees(layers, width)
    seen = planner.by_layer(*tree_of(trees), width, layers)
    values = sorted(planner.survivals(seen)[seen > 0].tolist(), reverse=True)
    rates = [
        (batch + sum(values[:drafts]))
        / planner.cost.one(batch + drafts, batch, layers, width=width)
        for drafts in range(len(values) + 1)
    ]
    planner._begin()  # what the last step looked at is over
    plan = planner.settle(seen, server.tiers(), width)
    assert rates[plan.rows - batch] == pytest.approx(max(rates))


def tree_of(trees: Batch) -> tuple[np.ndarray, np.ndarray]:
    return trees.depth, trees.least


@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 40), st.booleans())
def test_the_host_knows_how_many_nodes_trees_have(
    topk: int, layers: int, most: int, narrow: bool
) -> None:
    rows, nodes, width = 1, 1, 1 if narrow else topk
    for _ in range(layers):
        nodes += rows * topk
        rows = min(rows * topk, width)
    assert TreePlanner(topk, 5, most).full_rows(layers, width) == min(nodes, most)


@given(st.integers(0, 2**32 - 1), st.integers(1, DEPTH))
def test_in_layers_survival_falls_and_where_no_node_is_there_is_none(
    seed: int, layers: int
) -> None:
    server = MadeUpServer(3, rng=np.random.default_rng(seed))
    planner = TreePlanner(TOPK, DEPTH, NODES)
    trees = server.trees(layers)
    most = planner.layer_nodes(TOPK)
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

"""What is looked at for a classifier of trees, and what its table says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eval.tables import tree_inputs
from sglang_c2t.offline.compare import Array, Curve, everyone, resamples
from sglang_c2t.offline.tree_replay import Forest, replay_trees
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from tests.recordings import random_trees, recording, tree_origin

SHAPE = TreeShape(3, 3, 1 + 3 + 2 * 9)


@given(st.integers(0, 2**16))
def test_inputs_are_what_their_names_say_node_by_node(seed: int) -> None:
    trees = recording(random_trees(2, 3, topk=3, num_steps=3, seed=seed))
    found = tree_inputs.inputs_of(trees)
    nodes, parents = trees.nodes, trees.parent_rows().tolist()
    value = {name: column.tolist() for name, column in nodes.items()}
    for node, parent in enumerate(parents):
        mine = [n for n in range(trees.num_nodes) if value["draft"][n] == value["draft"][node]]
        layer = [n for n in mine if value["depth"][n] == value["depth"][node]]
        siblings = [n for n in mine if parents[n] == parent]
        before = lambda kind, among: [  # noqa: E731
            n
            for n in among
            if (-value[kind][n], n) < (-value[kind][node], node)  # noqa: B023
        ]
        ahead = before("joint", layer)
        expected = {
            "better_siblings": sum(value["prob"][n] for n in before("prob", siblings)),
            "layer_rank": np.log1p(len(ahead)),
            "better_in_layer": sum(value["joint"][n] for n in ahead),
            "parent_margin": 5.0 if parent < 0 else value["margin"][parent],
            "parent_entropy": 0.0 if parent < 0 else value["entropy"][parent],
            "root_margin": value["margin"][mine[0]],
            "root_entropy": value["entropy"][mine[0]],
        }
        for name, number in expected.items():
            assert found[name][node].item() == pytest.approx(number, abs=1e-5), name


def test_hits_are_those_of_the_requests_drafts_before() -> None:
    """Whatever comes behind them, and whatever other requests did."""
    trees = recording(random_trees(3, 5, topk=3, num_steps=2, seed=4))
    found = tree_inputs.inputs_of(trees)
    of = trees.nodes["draft"].tolist()
    for draft in range(trees.num_drafts):
        first = of.index(draft)
        earlier = [
            bool(trees.nodes["accept"][of.index(other)])
            for other in range(trees.num_drafts)
            if trees.drafts["request"][other] == trees.drafts["request"][draft]
            and trees.drafts["position"][other] < trees.drafts["position"][draft]
        ]
        share = (tree_inputs.PRIOR / 2 + sum(earlier)) / (tree_inputs.PRIOR + len(earlier))
        assert found["hits"][first].item() == pytest.approx(share)
        assert found["last_hit"][first].item() == (float(earlier[-1]) if earlier else 0.5)


def test_a_token_is_worth_less_where_drafts_are_mostly_right() -> None:
    prices = tree_inputs.price_of(torch.tensor([0.1, 0.5, 0.9]))
    assert prices[0] > prices[1] == 1.0
    assert prices[1] > prices[2] > 0.0


def test_a_network_learns_what_its_inputs_tell_and_reads_them_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_inputs, "BATCH", 64)
    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)) * 30 + 100
    labels = (x[:, 0] > 100).float()
    net = tree_inputs.fitted(x, labels, tree_inputs.Trial("", ("a", "b")))
    assert ((net(x) > 0) == labels.bool()).float().mean() > 0.95


def test_the_table_has_a_row_for_each_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_inputs, "EPOCHS", 1)
    origin = tree_origin(SHAPE)
    test, train = (
        recording(random_trees(4, 4, topk=3, num_steps=3, seed=seed), roots="every", origin=origin)
        for seed in (1, 2)
    )
    forest = Forest.from_recording(test)
    groups = ["math"] * forest.num_requests
    rival = Curve.of([replay_trees(EAGLE2(), forest, SHAPE._replace(num_draft_tokens=5))])
    tau: Callable[[Array], Array] = lambda weights: rival.tau(weights)[:, 0]  # noqa: E731
    lines = tree_inputs.inputs_table(
        forest, test, train, algorithm="EAGLE", targets={4: tau},
        weights=(everyone(groups), resamples(groups, 5)), console=Console(quiet=True),
    )  # fmt: skip
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    trials = [trial.name for trial in tree_inputs.TRIALS]
    assert names == ["inputs", *trials, "inputs", *trials]
    assert f"| C2T-plus | {4 * 48 + 48 + 48 + 1} | " in "\n".join(lines)

"""The menu for trees: names, options, defaults. What the rules grow is in ``draft/test_growth``."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sglang_c2t.classifier import checkpoint
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.draft.served import classifier_of
from sglang_c2t.draft_layer import PLACES, DraftLayer
from sglang_c2t.policies import (
    TREE_POLICIES,
    build_policy,
    build_tree_policy,
    policy_for,
    tree_policy_names,
)
from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree, PlannedTree
from tests.draft.own_rules import ByMark
from tests.refusals import refused

NEVER = float("-inf")


# -- the menu -----------------------------------------------------------------------------


def test_tree_policy_names_hold_tree_rules_and_gates_with_a_confidence() -> None:
    gates = ["c2t", "c2t-log", "c2t-plus", "dyjoint", "dymax"]
    pruned = [f"{gate}-eagle2" for gate in gates]
    assert tree_policy_names() == sorted([*TREE_POLICIES, "auto", *gates, *pruned])


@pytest.mark.parametrize("name", [*TREE_POLICIES, "c2t-eagle2"])
def test_tree_policy_for_chains_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"policy {name} grows trees: set --speculative-eagle-t"):
        build_policy(C2TConfig(policy=name))


def test_gate_cuts_chains_and_prunes_trees() -> None:
    config = C2TConfig(policy="dyjoint", beta=0.2)
    gate = build_policy(config)
    assert gate == DyJoint(0.2)
    assert build_tree_policy(config) == GatedTree(gate)
    assert build_tree_policy(replace(config, policy="dyjoint-eagle2")) == GatedEAGLE2(gate)


def test_tree_policy_takes_layer_limit_and_its_gate_the_other_options() -> None:
    options = {"layer_limit": 3}
    policy = build_tree_policy(C2TConfig(policy="dymax", beta=0.7, policy_options=options))
    assert isinstance(policy, GatedTree)
    assert (policy.layer_limit, policy.gate.beta) == (3, 0.7)
    assert options == {"layer_limit": 3}, "the configuration stays as it was"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dymax", {"layer_limit": 0}, "layer_limit must be a whole number >= 1, got 0"),
        ("dymax-eagle2", {"layer_limit": 2}, "does not take these options (['layer_limit'])"),
        ("dymax", {"width": 2}, "policy dymax does not take these options (['width'])"),
        *(
            (n, {}, f"policy {n} cuts chains only: set --speculative-eagle-topk 1")
            for n in ("fixed", "rows-only-eagle2")
        ),
        ("auto-eagle2", {}, "policy auto-eagle2: auto is no gate that could prune a tree"),
        ("auto", {"layer_limit": 2}, "auto does not take these options (['layer_limit'])"),
    ],
)
def test_tree_policy_unknown_option_or_chain_rule_is_refused_in_one_line(
    name: str, options: dict[str, Any], said: str
) -> None:
    with refused(said):
        build_tree_policy(C2TConfig(policy=name, policy_options=options))
    with refused("policy eagle2 has no threshold: drop --c2t-beta"):
        build_tree_policy(C2TConfig("eagle2", beta=0.5))


@dataclass(frozen=True)
class Own:
    """A user's tree rule: so many children of every row."""

    children: int = 1
    name: ClassVar[str] = "own"
    needs: ClassVar[frozenset[str]] = frozenset()

    def check(self, shape: TreeShape) -> None:
        """Any shape will do."""

    def grow(self, layer: TreeLayer) -> Growth:
        beyond = torch.arange(layer.topk) >= self.children
        return Growth(*[layer.joint.masked_fill(beyond, NEVER)] * 2)


def test_custom_tree_policy_or_gate_is_loaded_by_module_and_class() -> None:
    config = C2TConfig(policy=f"{__name__}:Own", policy_options={"children": 2})
    assert build_tree_policy(config) == Own(2)
    config = C2TConfig(policy=f"{__name__}:ByMark", beta=0.3, policy_options={"layer_limit": 4})
    assert build_tree_policy(config) == GatedTree(ByMark(0.3), 4)
    after = C2TConfig(policy=f"{__name__}:ByMark-eagle2", beta=0.3)
    assert build_tree_policy(after) == GatedEAGLE2(ByMark(0.3))


# -- what trees use by default ------------------------------------------------------------


def test_planned_tree_keeps_every_node_and_ranks_nan_last() -> None:
    """By the classifier for trees; a draft that computes nonsense is the least sure."""
    policy = build_tree_policy(C2TConfig())
    assert isinstance(policy, PlannedTree)
    of_gate = build_tree_policy(C2TConfig(policy="c2t-plus")).gate.classifier
    assert policy.gate.classifier.training == of_gate.training
    confidence = torch.tensor([0.0, 0.5, math.nan, 1.0])
    layer = DraftLayer(
        depth=1, prob=confidence, joint=confidence, entropy=confidence,
        alive=torch.ones(4, dtype=torch.bool), measured={"confidence": confidence},
    )  # fmt: skip
    growth = policy.grow(TreeLayer(layer, 2, 2))
    assert growth.key.flatten().tolist() == growth.expand.flatten().tolist() == [0.0, 0.5, 0.0, 1.0]


@pytest.mark.parametrize("name", ["c2t", "c2t-log", "c2t-plus"])
def test_tree_policy_uses_the_shipped_classifier_trained_on_trees(name: str) -> None:
    for_trees = build_tree_policy(C2TConfig(policy=name)).gate.classifier
    for_chains = build_policy(C2TConfig(policy=name)).classifier
    assert {origin["topk"] for origin in for_trees.training["origins"]} == {8}
    places = PLACES & set(for_trees.features.names)
    assert set(for_trees.features.names) - places == set(for_chains.features.names)
    assert places == (PLACES if name == "c2t-plus" else set())
    assert for_trees.training != for_chains.training


@pytest.mark.parametrize(
    ("config", "chains", "trees"),
    [
        (C2TConfig("c2t"), "mine/c2t", "mine/c2t-tree"),
        (C2TConfig("auto"), "mine/c2t-plus", "c2t-plus-tree"),
        (C2TConfig("c2t-eagle2"), None, "mine/c2t-tree"),
        (C2TConfig("c2t-log"), "c2t-log", "c2t-log-tree"),
        (C2TConfig("c2t", classifier="c2t"), "c2t", "c2t"),
        (C2TConfig("c2t", classifier="mine/c2t"), "mine/c2t", "mine/c2t"),
        (C2TConfig("dyjoint"), None, None),
    ],
)
def test_classifier_of_the_pair_is_used_where_one_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: C2TConfig, chains: str, trees: str
) -> None:
    """Given classifiers are used; a pair without one uses the others."""
    shutil.copytree(checkpoint.SHIPPED, tmp_path, dirs_exist_ok=True)
    for name in ("c2t", "c2t-tree", "c2t-plus"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        for suffix in (".json", ".safetensors"):
            shutil.copy(tmp_path / f"{name}{suffix}", tmp_path / "mine")
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path)
    for shape, wanted in ((TreeShape(1, 5, 6), chains), (TreeShape(4, 5, 16), trees)):
        try:
            classifier = classifier_of(policy_for(config, shape, "mine"))
        except ConfigError:
            assert wanted is None
            continue
        assert (classifier.name if classifier else None) == wanted
        others = classifier_of(policy_for(config, shape))
        assert others is None or "/" not in others.name or "/" in config.classifier


@pytest.mark.parametrize("name", ["c2t", "c2t-log", "c2t-plus", "dyjoint"])
def test_tree_policy_default_threshold_is_its_own(name: str) -> None:
    gate = build_tree_policy(C2TConfig(policy=name)).gate
    assert gate.beta == type(gate).tree_beta
    assert build_tree_policy(C2TConfig(policy=f"{name}-eagle2")).gate.beta == gate.beta
    assert build_tree_policy(C2TConfig(policy=name, beta=0.2)).gate.beta == 0.2
    assert build_policy(C2TConfig(policy=name)).beta == type(gate).beta

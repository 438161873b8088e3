"""Which policies become a kernel program, and that the program is the policy's gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.features import FeatureSpec
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.config import C2TConfig
from sglang_c2t.kernels.beams import Rule
from sglang_c2t.kernels.gate_program import MAX_HIDDEN, MAX_TOPK
from sglang_c2t.policies import DraftLayer, build_policy, build_tree_policy
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.fused import fused_gate, growth_rule
from sglang_c2t.policies.gated_tree import GatedTree

TRAINED = ("c2t", "c2t-log", "c2t-plus")


def gate_with(*names: str, hidden_sizes: tuple[int, ...] = (48,)) -> C2T:
    net = ConfidenceNet(len(names), hidden_sizes)
    return C2T(Classifier(net, FeatureSpec(names=names), {}))


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("suffix", ["", "-eagle2"])
@pytest.mark.parametrize("trees", [False, True])
def test_fused_gate_of_a_classifier_holds_its_network_and_threshold(
    name: str, suffix: str, trees: bool
) -> None:
    config = C2TConfig(policy=name + suffix * trees)
    policy = (build_tree_policy if trees else build_policy)(config)
    gate: Any = policy.gate if trees else policy  # type: ignore[attr-defined]
    program = fused_gate(policy, "cpu")
    assert program is not None
    assert program.names == gate.classifier.features.names
    assert program.beta.item() == pytest.approx(gate.beta)
    for mine, theirs in zip(program.weights, gate.classifier.net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("policy", "feature", "sign", "beta"),
    [
        (DyJoint(0.2), "joint", 1.0, 0.2), (DyMax(0.2), "prob", 1.0, 0.2),
        (GatedTree(DyMax(0.2)), "prob", 1.0, 0.2),
        (Fixed(2), "depth", -1.0, -2.0), (Fixed(), "depth", -1.0, -math.inf),
    ],
)  # fmt: skip
def test_fused_gate_of_a_threshold_policy_is_one_feature(
    policy: Any, feature: str, sign: float, beta: float
) -> None:
    program = fused_gate(policy, "cpu")
    assert program is not None
    assert (program.names, program.hidden_size, program.sign.item()) == ((feature,), 0, sign)
    assert program.beta.item() == pytest.approx(beta)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [(EAGLE2(), Rule("joint")), (GatedTree(DyJoint(), layer_limit=3), Rule("gated", 3))],
)
def test_growth_rule_of_a_tree_policy_is_the_kernels(policy: Any, rule: Rule) -> None:
    assert growth_rule(policy) == rule
    assert fused_gate(policy, "cpu", topk=4) is not None


@pytest.mark.parametrize(
    "gate",
    [
        gate_with("joint", hidden_sizes=(8, 8)),
        gate_with("joint", hidden_sizes=()),
        gate_with("joint", hidden_sizes=(MAX_HIDDEN + 1,)),
        gate_with("joint", "entropy_top1000"),
    ],
    ids=["two layers", "no layer", "too wide", "unknown feature"],
)
def test_fused_gate_of_an_unsupported_network_is_none(gate: Any) -> None:
    assert fused_gate(gate, "cpu") is None


class Another(DyJoint):
    """Decides as its rule does."""


class Stricter(DyJoint):
    """A decision of its own."""

    def keep(self, layer: DraftLayer) -> Tensor:
        return layer.joint >= 2 * self.beta


class Hotter(DyJoint):
    """A confidence of its own."""

    def confidence(self, layer: DraftLayer) -> Tensor:
        return layer.joint**0.5


@dataclass(frozen=True)
class OwnTree(GatedTree):
    """May grow otherwise."""


def test_fused_gate_of_a_subclass_with_its_own_decision_is_none() -> None:
    """A subclass may decide otherwise, and its word counts."""
    assert fused_gate(Another(), "cpu") is not None
    for policy in (Stricter(), Hotter(), GatedTree(Stricter()), OwnTree(DyJoint())):
        assert fused_gate(policy, "cpu") is None


def test_fused_gate_of_a_tree_wider_than_the_kernel_is_none() -> None:
    assert fused_gate(GatedTree(DyJoint()), "cpu", topk=MAX_TOPK) is not None
    assert fused_gate(GatedTree(DyJoint()), "cpu", topk=MAX_TOPK + 1) is None

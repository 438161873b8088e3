"""Which policies kernels can run in place of torch: C2T's family, DyJoint, DyMax, EAGLE-2.

Only the measuring and asking moves into :mod:`sglang_c2t.kernels.gate`; the rule and its
threshold stay the policy's. Whatever the kernel does not know is asked in torch: other
networks, isotonic calibration, rules of the user's own.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.kernels.gate import MAX_TOPK, FusedGate, Weights
from sglang_c2t.kernels.trees import Rule
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree, PlannedTree

#: What becomes of the confidence in trees.
_GROWS = {GatedTree: "gated", GatedEAGLE2: "filtered", PlannedTree: "planned"}
#: The confidence of gates without a network.
_PLAIN = {DyJoint: "joint", DyMax: "prob"}


def fused_gate(policy: Any, device: torch.device | str, *, topk: int = 1) -> FusedGate | None:
    """The policy's gate for the kernel, or ``None`` if it must be asked in torch.

    Args:
        policy: For chains or for trees; of a tree policy its gate.
        device: Where the logits will be.
        topk: Children per row.
    """
    gate = policy.gate if type(policy) in _GROWS else policy
    if topk > MAX_TOPK:
        return None
    if type(policy) is EAGLE2:
        return FusedGate(("joint",), None, beta=0.0, device=device)
    for rule, name in _PLAIN.items():
        if _follows(gate, rule):
            return FusedGate((name,), None, beta=gate.beta, device=device)
    if not _follows(gate, C2T):
        return None
    net, names = gate.classifier.net, gate.classifier.features.names
    if (
        not isinstance(net, ConfidenceNet)
        or len(net.hidden_sizes) != 1
        or gate.classifier.isotonic is not None
        or FusedGate.refusal(names, net.hidden_sizes) is not None
    ):
        return None
    return FusedGate(names, Weights(*net.parameters()), beta=gate.beta, device=device)


def growth_rule(policy: Any) -> Rule | None:
    """How a tree policy's layers grow, for the kernel; ``None``: it must be asked in torch."""
    if type(policy) is EAGLE2:
        return Rule("joint")
    kind = _GROWS.get(type(policy))
    return None if kind is None else Rule(kind, getattr(policy, "layer_limit", None) or 0)


def _follows(gate: Any, rule: type[Any]) -> bool:
    """Whether the gate decides by ``rule``'s own methods, as a subclass may or may not."""
    kind = type(gate)
    return isinstance(gate, rule) and kind.keep is rule.keep and kind.confidence is rule.confidence

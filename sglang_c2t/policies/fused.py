"""Maps policies to kernels that compute the same decision; all policies of the menu have one.

Measuring and judging moves into :mod:`sglang_c2t.kernels.gate`. The rule and its threshold stay the
policy's. Torch runs what the kernel does not know: other networks, rules of users and of
``eval/baselines``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sglang_c2t.kernels.beams import Rule
from sglang_c2t.kernels.gate_program import MAX_TOPK, FusedGate, Weights
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree, PlannedTree

#: How trees use the confidence.
_GROWS = {GatedTree: "gated", GatedEAGLE2: "filtered", PlannedTree: "planned"}

#: A program's arguments for each policy whose rule a kernel knows.
_PROGRAMS: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
    DyJoint: lambda gate: {"names": ("joint",), "beta": gate.beta},
    DyMax: lambda gate: {"names": ("prob",), "beta": gate.beta},
    Fixed: lambda gate: {"names": ("depth",), "beta": -_length(gate), "sign": -1},
    C2T: lambda gate: {**_network(gate), "beta": gate.beta},
    EAGLE2: lambda _: {"names": ("joint",), "beta": 0.0},  # its confidence is not used
}


def fused_gate(policy: Any, device: torch.device | str, *, topk: int = 1) -> FusedGate | None:
    """Return the policy's gate for the kernel; ``None`` if torch must run it.

    Args:
        policy: For chains or for trees; a tree policy's gate is used.
        device: Device of the logits.
        topk: Children per row.
    """
    gate = policy.gate if type(policy) in _GROWS else policy
    rule = next((rule for rule in _PROGRAMS if _follows(gate, rule)), None)
    if rule is None or topk > MAX_TOPK:
        return None
    given = {"weights": None, **_PROGRAMS[rule](gate)}
    weights = given["weights"]
    sizes = () if weights is None else (weights.hidden_weight.shape[0],)
    if given["names"] is None or FusedGate.refusal(given["names"], sizes) is not None:
        return None
    return FusedGate(**given, device=device)


def growth_rule(policy: Any) -> Rule | None:
    """Return the kernel's rule to grow a tree policy's layers; ``None`` if torch must run it."""
    kind = ({EAGLE2: "joint"} | _GROWS).get(type(policy))
    return None if kind is None else Rule(kind, getattr(policy, "layer_limit", None) or 0)


def _network(gate: Any) -> dict[str, Any]:
    """Return the classifier's features and weights; no names if a kernel cannot compute it."""
    classifier = gate.classifier
    if len(classifier.net.hidden_sizes) != 1:
        return {"names": None}
    return {"names": classifier.features.names, "weights": Weights(*classifier.net.parameters())}


def _length(policy: Fixed) -> float:
    return math.inf if policy.length is None else policy.length


def _follows(gate: Any, rule: type[Any]) -> bool:
    """Whether the gate decides by ``rule``'s own methods, which a subclass may override. Subclasses
    of a tree policy may override the rule, so they are never fused.
    """
    kind = type(gate)
    if hasattr(rule, "grow"):
        return kind is rule
    decide = ("keep", "confidence")
    return isinstance(gate, rule) and all(
        getattr(kind, name, None) is getattr(rule, name, None) for name in decide
    )

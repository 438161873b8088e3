"""Which policies kernels can run in place of torch: all of the menu but ``mcsd-hidden``.

Only the measuring and asking moves into :mod:`sglang_c2t.kernels.gate`; the rule and its
threshold stay the policy's. Whatever the kernel does not know is asked in torch: other
networks, isotonic calibration, rules of the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sglang_c2t.classifier.model import ConfidenceNet, DepthLogistic
from sglang_c2t.kernels.gate import MAX_TOPK, DepthWeights, FusedGate, Weights
from sglang_c2t.kernels.trees import Rule
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.entropy import Entropy
from sglang_c2t.policies.entropy_width import EntropyWidth
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.fork import Fork
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree, PlannedTree
from sglang_c2t.policies.logistic import Logistic
from sglang_c2t.policies.mcsd import MCSD
from sglang_c2t.policies.static_tree import StaticTree

#: What becomes of the confidence in trees.
_GROWS = {GatedTree: "gated", GatedEAGLE2: "filtered", PlannedTree: "planned"}

#: A program's arguments, of a policy that decides as its rule does.
_PROGRAMS: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
    DyJoint: lambda gate: {"names": ("joint",), "beta": gate.beta},
    DyMax: lambda gate: {"names": ("prob",), "beta": gate.beta},
    Entropy: lambda gate: {"names": ("entropy",), "beta": -gate.max_entropy, "sign": -1},
    Fixed: lambda gate: {"names": ("depth",), "beta": -_length(gate), "sign": -1},
    C2T: lambda gate: {**_network(gate), "beta": gate.beta},
    Logistic: lambda gate: {**_network(gate), "beta": gate.beta, "running": True},
    MCSD: lambda gate: {**_network(gate), "beta": gate.beta, "together": gate.batch_wide},
    # Of trees that ask no gate: what their rule reads.
    EAGLE2: lambda _: {"names": ("joint",), "beta": 0.0},
    Fork: lambda _: {"names": ("joint",), "beta": 0.0},
    StaticTree: lambda _: {"names": ("joint",), "beta": 0.0},
    EntropyWidth: lambda policy: {"names": ("entropy",), "beta": _stops_above(policy)},
}


def fused_gate(policy: Any, device: torch.device | str, *, topk: int = 1) -> FusedGate | None:
    """The policy's gate for the kernel, or ``None`` if it must be asked in torch.

    Args:
        policy: For chains or for trees; of a tree policy its gate.
        device: Where the logits will be.
        topk: Children per row.
    """
    gate = policy.gate if type(policy) in _GROWS else policy
    rule = next((rule for rule in _PROGRAMS if _follows(gate, rule)), None)
    if rule is None or topk > MAX_TOPK:
        return None
    given = {"weights": None, **_PROGRAMS[rule](gate)}
    if given.get("running") and type(policy) is GatedEAGLE2:
        return None  # a beam is known by its joint probability there, not by its confidence
    weights = given["weights"]
    sizes = (weights.hidden_weight.shape[0],) if isinstance(weights, Weights) else ()
    if given["names"] is None or FusedGate.refusal(given["names"], sizes) is not None:
        return None
    return FusedGate(**given, device=device)


def growth_rule(policy: Any) -> Rule | None:
    """How a tree policy's layers grow, for the kernel; ``None``: it must be asked in torch."""
    kind = type(policy)
    if kind is Fork:
        return Rule("fork", policy.width or 0)
    plain = {EAGLE2: "joint", EntropyWidth: "width", StaticTree: "static"} | _GROWS
    return Rule(plain[kind], getattr(policy, "layer_limit", None) or 0) if kind in plain else None


def _network(gate: Any) -> dict[str, Any]:
    """The classifier's features and numbers; no names where a kernel cannot compute it."""
    net, names = gate.classifier.net, gate.classifier.features.names
    weights: Weights | DepthWeights | None = None
    if gate.classifier.isotonic is None:
        if isinstance(net, ConfidenceNet) and len(net.hidden_sizes) == 1:
            weights = Weights(*net.parameters())
        elif isinstance(net, DepthLogistic) and names[1:] == ("depth",):
            weights = DepthWeights(*net.parameters())
    return {"names": None if weights is None else names, "weights": weights}


def _length(policy: Fixed) -> float:
    return math.inf if policy.length is None else policy.length


def _stops_above(policy: EntropyWidth) -> float:
    return policy.stop_entropy if policy.depth == "dynamic" else math.inf


def _follows(gate: Any, rule: type[Any]) -> bool:
    """Whether the gate decides by ``rule``'s own methods, as a subclass may or may not; of a rule
    that grows trees nobody knows a subclass's.
    """
    kind = type(gate)
    if hasattr(rule, "grow"):
        return kind is rule
    decide = ("keep", "confidence")
    return isinstance(gate, rule) and all(
        getattr(kind, name, None) is getattr(rule, name, None) for name in decide
    )

"""Rules that no gate program knows, so that torch is asked."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any


def in_torch(policy: Any) -> Any:
    """The same rule, or tree policy with it, as a class of a user's own."""
    gate = getattr(policy, "gate", policy)
    kind: Any = type(gate)
    own = type("Own", (kind,), {"confidence": lambda self, layer: kind.confidence(self, layer)})
    rule = own(**{field.name: getattr(gate, field.name) for field in fields(gate)})
    return rule if gate is policy else replace(policy, gate=rule)

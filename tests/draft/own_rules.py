"""Rules that no gate program knows, so that torch is asked; and explorations by a list."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from sglang_c2t.draft.gate import Exploration
from sglang_c2t.draft_layer import DraftLayer


class Scheduled(Exploration):
    """Explores the steps that a list names."""

    def __init__(self, *steps: bool, names: frozenset[str] = frozenset({"margin"})) -> None:
        self.steps, self.names = list(steps), names

    def next_step_explores(self) -> bool:
        return self.steps.pop(0)


@dataclass(frozen=True)
class ByMark:
    """A number that a test wrote where the margin stands as the confidence: free of all else."""

    beta: float = 0.5
    name: ClassVar[str] = "by-mark"
    needs: ClassVar[frozenset[str]] = frozenset({"margin"})

    def confidence(self, layer: DraftLayer) -> Tensor:
        return layer.measured["margin"]

    def keep(self, layer: DraftLayer) -> Tensor:
        return self.confidence(layer) >= self.beta


def in_torch(policy: Any) -> Any:
    """The same rule, or tree policy with it, as a class of a user's own."""
    gate = getattr(policy, "gate", policy)
    kind: Any = type(gate)
    own = type("Own", (kind,), {"confidence": lambda self, layer: kind.confidence(self, layer)})
    rule = own(**{field.name: getattr(gate, field.name) for field in fields(gate) if field.init})
    return rule if gate is policy else replace(policy, gate=rule)

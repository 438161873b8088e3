"""Features of a classifier: their names, order and conventions of measurement.

P  joint draft probability of the token, product of q along its path (C2T, eq. 6)
H  entropy in nats of the distribution the token was drawn from (eq. 7; over the whole
   vocabulary, or cut to the M largest probabilities)
d  depth, 1 for the first drafted token

Equations: C2T, arXiv:2502.13652. Pure torch; knows nothing of SGLang.

Legend: B tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.checks import ConfigError, shown
from sglang_c2t.draft_layer import DraftLayer, known_measurement

#: Smaller joint probabilities are clipped to this one, so that the logarithm stays finite.
MIN_PROB = 1e-9

#: Features computed from others; every other name is a measurement.
DERIVED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "log_joint": ("joint", lambda joint: joint.clamp(min=MIN_PROB).log()),
}

#: Most names of a spec.
MOST_FEATURES = 64

_ALWAYS = ("joint", "prob", "entropy", "depth")


@dataclass(frozen=True)
class FeatureSpec:
    """The inputs of a classifier. Serving must match training. Every classifier card and every
    recording holds it. Loading a file whose spec this version cannot compute is an error.
    """

    names: tuple[str, ...] = ("joint", "entropy", "depth")
    entropy_unit: str = "nat"
    depth_of_first_token: int = 1
    temperature: float = 1.0  # of the draft softmax
    distribution: str = "draft"  # over the draft's own output vocabulary

    @property
    def needs(self) -> frozenset[str]:
        """Measurements beyond those that every layer has."""
        sources = {DERIVED[name][0] if name in DERIVED else name for name in self.names}
        return frozenset(sources - set(_ALWAYS))

    def to_card(self) -> dict[str, Any]:
        """Return the spec for JSON."""
        return {**asdict(self), "names": list(self.names)}

    @classmethod
    def from_card(cls, card: dict[str, Any], *, source: str) -> FeatureSpec:
        """Read a spec; ConfigError if this version cannot compute it."""
        if not isinstance(card, dict):
            raise ConfigError(f"{source}: 'features' must be an object, got {shown(card)}")
        known = set(cls.__dataclass_fields__)
        if set(card) != known or not isinstance(card["names"], list):
            raise ConfigError(
                f"{source}: feature fields {shown(sorted(card), 200)} differ from {sorted(known)}; "
                "the file was written by another version, make it again"
            )
        spec = cls(**{**card, "names": tuple(card["names"])})
        if not 1 <= len(spec.names) <= MOST_FEATURES:
            raise ConfigError(f"{source} names no features, or more than {MOST_FEATURES}")
        computed = (*_ALWAYS, *DERIVED)
        strange = [n for n in spec.names if n not in computed]
        strange = [str(n) for n in strange if not (isinstance(n, str) and known_measurement(n))]
        if strange:
            raise ConfigError(f"{source}: unknown features {', '.join(strange)[:200]}")
        mine = CONVENTIONS.to_card()
        differing = [key for key in mine if key != "names" and mine[key] != card[key]]
        if differing:
            said = ", ".join(f"{key} {shown(card[key])} (here: {mine[key]!r})" for key in differing)
            raise ConfigError(
                f"{source} was measured otherwise than this version measures: {said}; "
                "record and train again"
            )
        return spec


#: Conventions of this version.
CONVENTIONS = FeatureSpec()


def feature_matrix(names: tuple[str, ...], layer: DraftLayer) -> Tensor:
    """[B, F] float32 in the order of ``names``. Names ("joint", "depth"), joint [0.25], depth 3 ->
    [[0.25, 3.0]].
    """
    return torch.stack([_column(name, layer).float() for name in names], dim=-1)


def _column(name: str, layer: DraftLayer) -> Tensor:
    if name in DERIVED:
        source, compute = DERIVED[name]
        return compute(_column(source, layer))
    if name == "depth":
        depth = layer.depth
        return depth if isinstance(depth, Tensor) else torch.full_like(layer.prob, float(depth))
    if name in _ALWAYS:
        return getattr(layer, name)
    return layer.measured[name]

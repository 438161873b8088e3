"""Entropy stop: end the draft where the draft model's distribution is too flat.

keep = H_i <= max_entropy, H_i in nats over the draft's vocabulary. The "early stopping" of
Gunjur and Waitz, "Fast Inference with Dynamic Tree Speculative Decoding" (Stanford CS),
section 3.1 and Figure 5a, threshold 1 there; its tree shapes are a different rule.

Sampled drafts: safe to drop, because H_i is a function of the distribution alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_c2t.checks import is_number, require
from sglang_c2t.policies.base import DraftLayer


@dataclass(frozen=True)
class Entropy:
    """Threshold on the entropy the token was drawn from."""

    max_entropy: float = 1.0  # nats
    name: ClassVar[str] = "entropy"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Reject what is no entropy."""
        require(
            is_number(self.max_entropy) and self.max_entropy >= 0,
            "policy entropy: max_entropy",
            "a number of nats >= 0",
            self.max_entropy,
        )

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: the entropy does not exceed the threshold."""
        return layer.entropy <= self.max_entropy

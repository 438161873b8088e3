"""Fixed draft length: verify the first ``length`` drafted tokens of every request.

keep(d) = d <= length. The classic speculative decoding of Leviathan et al.
(arXiv:2211.17192); ``length`` defaults to all drafted tokens.

Sampled drafts: safe to drop, because the rule reads nothing that was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_c2t.checks import is_whole, require
from sglang_c2t.policies.base import DraftLayer


@dataclass(frozen=True)
class Fixed:
    """Keep tokens up to depth ``length``; ``None`` keeps all."""

    length: int | None = None
    name: ClassVar[str] = "fixed"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Reject lengths that are not whole non-negative numbers."""
        require(
            self.length is None or is_whole(self.length),
            "policy fixed: length",
            "a whole number >= 0",
            self.length,
        )

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: depth is within the fixed length."""
        everything = torch.ones_like(layer.alive)
        return everything if self.length is None else everything & (layer.depth <= self.length)

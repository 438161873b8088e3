"""Fixed draft length: verify the first ``length`` drafted tokens of every request.

keep(d) = d <= length. The classic speculative decoding of Leviathan et al.
(arXiv:2211.17192); ``length`` defaults to all drafted tokens.

Sampled drafts: safe to drop, because nothing that was drawn is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.policies.base import DraftLayer


@dataclass(frozen=True)
class Fixed:
    """Keep tokens up to depth ``length``; ``None`` keeps all."""

    length: int | None = None
    name: ClassVar[str] = "fixed"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Reject lengths that are not whole non-negative numbers."""
        valid = isinstance(self.length, int) and not isinstance(self.length, bool)
        if self.length is not None and not (valid and self.length >= 0):
            raise ConfigError(
                f"policy fixed: length must be a whole number >= 0, got {self.length!r}"
            )

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: depth is within the fixed length."""
        everything = torch.ones_like(layer.alive)
        return everything if self.length is None else everything & (layer.depth <= self.length)

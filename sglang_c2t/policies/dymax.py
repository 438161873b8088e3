"""DyMax: stop when the draft is unsure of the token itself.

keep = p_i >= threshold, with p_i the draft's probability of its most likely token, which it drafts.
The early-exit baseline of C2T's chain experiments (arXiv:2502.13652, Table 7), threshold 0.3 there.

Sampled drafts: safe to drop while p_i is the largest probability; keep-then-stop if it
were the drawn token's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_c2t.policies.base import DraftLayer, Gate


@dataclass(frozen=True)
class DyMax(Gate):
    """Threshold on the token's own draft probability."""

    beta: float = 0.3
    name: ClassVar[str] = "dymax"
    needs: ClassVar[frozenset[str]] = frozenset()

    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B] float32 in [0, 1]: the token's own probability."""
        return layer.prob

"""DyJoint: stop when the chain so far has become unlikely.

keep = P_i >= threshold, P_i = prod_{j <= i} p_j. The second early-exit baseline of C2T's chain
experiments (arXiv:2502.13652, Table 7), threshold 0.08 there. EAGLE-2 ranks tree nodes by this
confidence (arXiv:2406.16858); here it is a stopping rule.

Sampled drafts: keep-then-stop, because P_i contains the probability of the drawn token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_c2t.policies.base import DraftLayer, Gate


@dataclass(frozen=True)
class DyJoint(Gate):
    """Threshold on the joint draft probability."""

    beta: float = 0.08
    name: ClassVar[str] = "dyjoint"
    tree_beta: ClassVar[float] = 0.03  # ours: about a dozen nodes on the demo models
    needs: ClassVar[frozenset[str]] = frozenset()

    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B] float32 in [0, 1]: the joint probability itself."""
        return layer.joint

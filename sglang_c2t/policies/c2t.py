"""C2T: keep a drafted token while the classifier's confidence reaches beta.

C_i = F(P_i, H_i, d_i), keep = C_i >= beta (arXiv:2502.13652, eq. 8 and Algorithm 1). P is the joint
probability, H the entropy of the token's distribution and d its depth. F is a 3-48-1 ReLU network
with a sigmoid, 241 parameters. In chains this is an early exit per request (the paper's appendix
I).

Sampled drafts: keep-then-stop, because P_i contains the probability of the drawn token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.policies.base import DraftLayer, Gate


@dataclass(frozen=True)
class C2T(Gate):
    """Confidence gate with a trained classifier."""

    classifier: Classifier
    beta: float = 0.5  # arXiv:2502.13652, the main setting for trees
    name: ClassVar[str] = "c2t"
    tree_beta: ClassVar[float] = 0.5
    reads: ClassVar[frozenset[str]] = frozenset({"joint", "entropy", "entropy_top1000", "depth"})

    @property
    def needs(self) -> frozenset[str]:
        """Inputs of the classifier."""
        return self.classifier.features.needs

    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B] float32 in [0, 1]: F(P, H, d)."""
        return self.classifier.confidence(layer)

"""MCSD's decision models: stop drafting when no sequence is likely to be accepted.

a_i = MLP(top-k draft probabilities, entropy), two layers (type 2 of Lu et al., "Improving
Multi-candidate Speculative Decoding", arXiv:2409.10644, section 3.3), or a_i = MLP(draft
hidden state), three layers (type 1). Drafting stops when a_i < threshold for *all*
sequences, 0.4 in the paper; ``per_request`` stops each sequence by itself.

The paper leaves open: k (here 10), the layer sizes (48; 64 and 32), and, for type 1, the
label max(1, p/q), which is never below 1; read as min(1, p/q), and under a greedy target
that is "accepted or not". Both models are trained on tokens that verification reached.
The paper keeps the token it stopped at; here it goes, like every policy's failing token.

Sampled drafts: safe to drop, because both inputs are functions of the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_c2t.checks import require
from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.policies.base import DraftLayer


@dataclass(frozen=True)
class MCSD:
    """Threshold on a decision model, for the whole batch or per request."""

    classifier: Classifier
    beta: float = 0.4
    per_request: bool = False
    name: ClassVar[str] = "mcsd"
    reads: ClassVar[frozenset[str]] = frozenset({"topk_prob", "entropy"})
    label: ClassVar[str] = "accepts"

    def __post_init__(self) -> None:
        """Reject what says neither."""
        require(
            isinstance(self.per_request, bool),
            f"policy {self.name}: per_request",
            "true or false",
            self.per_request,
        )

    @property
    def needs(self) -> frozenset[str]:
        """What the decision model reads."""
        return self.classifier.features.needs

    @property
    def batch_wide(self) -> bool:
        """Whether the outcome for a request depends on who shares its batch."""
        return not self.per_request

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: a living sequence of the batch, or the token's own, reaches beta."""
        likely = self.classifier.confidence(layer) >= self.beta
        if self.per_request:
            return likely
        return (likely & layer.alive).any().expand_as(likely)


@dataclass(frozen=True)
class MCSDHidden(MCSD):
    """The same rule on the draft's hidden state. Trained for one draft model only."""

    name: ClassVar[str] = "mcsd-hidden"
    reads: ClassVar[frozenset[str]] = frozenset({"hidden"})

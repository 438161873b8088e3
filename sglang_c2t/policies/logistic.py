"""Logistic: two parameters per depth on the draft's top-2 margin.

a_i = sigmoid(w_d m_i + b_d) estimates "accepted, if the tokens before it are", with m_i
the log ratio of the two most likely draft tokens; keep = prod_{j <= i} a_j >= beta. The
estimator of vLLM's adaptive verification (vllm-project/vllm PR 52228), as a threshold
rule; the PR's text names logit(max q) instead of m_i, which the recipe ``logistic-prob``
trains. vLLM refits it online and feeds a cost model instead of a threshold, so no default
threshold is published; 0.3 is ours.

Sampled drafts: safe to drop, because m_i and the acceptances before i are functions of
the distributions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.policies.base import DraftLayer, Gate


@dataclass(frozen=True)
class Logistic(Gate):
    """Threshold on the running product of per-depth acceptance estimates."""

    classifier: Classifier
    beta: float = 0.3
    name: ClassVar[str] = "logistic"
    tree_beta: ClassVar[float] = 0.03  # ours: about a dozen nodes on the demo models
    reads: ClassVar[frozenset[str]] = frozenset({"margin", "logit_prob", "depth"})
    label: ClassVar[str] = "accepts"
    reads_parent: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """The margin."""
        return self.classifier.features.needs

    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B]: product of the estimates down to this layer; each costs two numbers."""
        accept = self.classifier.confidence(layer)
        return accept if layer.parent is None else accept * self.confidence(layer.parent)

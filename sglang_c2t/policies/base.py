"""What a chain policy sees and decides. Knows nothing of SGLang, paths or files.

A policy is asked once per drafted layer, for the whole batch. It answers which tokens
stay. The caller keeps the running conjunction, so a chain that has ended stays ended
(Algorithm 1 of C2T, arXiv:2502.13652, restricted to one child per node).

Legend: B requests, k top probabilities, H draft hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


@dataclass(frozen=True)
class DraftLayer:
    """Layer ``depth`` of a batch of draft chains: one drafted token per request."""

    depth: int
    """1 for the first drafted token (child of the root, which is already committed)."""

    prob: Tensor
    """[B] float32: q(token | prefix), softmax of the draft logits at temperature 1."""

    joint: Tensor
    """[B] float32: product of ``prob`` along the chain, this token included."""

    entropy: Tensor
    """[B] float32, nats: entropy of the distribution the token was drawn from."""

    alive: Tensor
    """[B] bool: the chain has not ended before this token. A policy that stops the
    whole batch at once (MCSD) needs it; others may ignore it."""

    topk_prob: Tensor | None = None
    """[B, k] float32, descending; only when the policy ``needs`` ``"topk_prob"``."""

    hidden: Tensor | None = None
    """[B, H]: the draft's hidden state; only when the policy ``needs`` ``"hidden"``."""


class ChainPolicy(Protocol):
    """Decides where each request's draft ends."""

    name: ClassVar[str]
    """As written after ``--c2t-policy``."""

    needs: ClassVar[frozenset[str]]
    """Optional fields of :class:`DraftLayer` the policy reads."""

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: the target should verify this token.

        Pure tensor code without host reads, so that it can be captured in a CUDA graph.
        """
        ...

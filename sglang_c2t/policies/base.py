"""What a chain policy is: a rule that says, layer by layer, which drafts stay.

A policy is asked once per drafted layer, for the whole batch. The caller keeps the
running conjunction, so a chain that has ended stays ended (Algorithm 1 of C2T,
arXiv:2502.13652, restricted to one child per node).

Every rule here is lossless because drafts are argmax: what is verified is a function of
the prefix. Were drafts *sampled* (``--speculative-use-rejection-sampling``, refused for
now), a rule that reads the drawn token itself could bias the output. Each policy's
docstring says which kind it is: "safe to drop" or "keep-then-stop", i.e. the failing
token must still be verified and only the tokens behind it may go.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from sglang_c2t.draft_layer import DraftLayer

__all__ = ["ChainPolicy", "DraftLayer"]


class ChainPolicy(Protocol):
    """Decides where each request's draft ends."""

    name: ClassVar[str]
    """As written after ``--c2t-policy``."""

    @property
    def needs(self) -> frozenset[str]:
        """Names from :attr:`DraftLayer.measured` that the policy reads."""
        ...

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: the target should verify this token.

        Pure tensor code without host reads, so that it can be captured in a CUDA graph.
        """
        ...

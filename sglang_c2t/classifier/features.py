"""The classifier's three inputs, and the contract that says how they were measured.

P  joint draft probability of the token, product of q along its path (eq. 1)
H  entropy in nats of the distribution the token was drawn from (eq. 2, or eq. 3 when
   cut to the 1000 largest probabilities)
d  depth, 1 for the first drafted token

Equations: C2T, arXiv:2502.13652. Pure torch; knows nothing of SGLang.

Legend: B requests, V draft vocabulary, F features.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_c2t.config import ConfigError

PAPER_ENTROPY_TOPK = 1000


@dataclass(frozen=True)
class FeatureSpec:
    """How the numbers fed to a classifier were computed. Serving must match training.

    Written into every classifier card and every recording; loading a file whose spec
    differs from one this version can compute is an error.
    """

    names: tuple[str, ...] = ("joint", "entropy", "depth")
    entropy: str = "full"  # over the draft's whole vocabulary, or "top1000"
    entropy_unit: str = "nat"
    joint: str = "raw"  # probability itself, not its logarithm
    depth_of_first_token: int = 1
    temperature: float = 1.0  # of the draft softmax
    distribution: str = "draft"  # over the draft's own output vocabulary

    def to_card(self) -> dict[str, Any]:
        """The spec as it stands in JSON."""
        return {**asdict(self), "names": list(self.names)}

    @classmethod
    def from_card(cls, card: dict[str, Any], *, source: str) -> FeatureSpec:
        """Read a spec back, refusing keys and values that this version does not know."""
        if not isinstance(card, dict):
            raise ConfigError(f"{source}: 'features' must be an object, got {card!r}")
        known = set(cls.__dataclass_fields__)
        if set(card) != known:
            raise ConfigError(
                f"{source}: feature fields {sorted(card)} differ from {sorted(known)}; "
                "the file was written by another version, train it again"
            )
        return cls(**{**card, "names": tuple(card["names"])})


#: The only features this version measures.
SERVED = FeatureSpec()


class TokenStats(NamedTuple):
    """What one draft distribution says about its argmax token."""

    prob: Tensor  # [B] float32, probability of the argmax token
    entropy: Tensor  # [B] float32, nats


def token_stats(logits: Tensor, *, entropy_topk: int | None = None) -> TokenStats:
    """Probability of the argmax token and entropy of each row.

    ``logits`` is [B, V], any float type; -inf entries have probability zero.
    ``entropy_topk`` cuts the entropy to that many largest probabilities (eq. 3; the
    probabilities are not renormalised), ``None`` uses all.

    For logits [0, 0]: prob 0.5, entropy ln 2.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)  # [B, V]
    prob = log_probs.amax(dim=-1).exp()
    if entropy_topk is not None and entropy_topk < log_probs.shape[-1]:
        log_probs = log_probs.topk(entropy_topk, dim=-1).values
    probs = log_probs.exp()
    # 0 * -inf would be nan; such a token adds nothing to the entropy.
    terms = torch.where(probs > 0, probs * log_probs, torch.zeros_like(probs))
    return TokenStats(prob=prob, entropy=-terms.sum(dim=-1))


def feature_matrix(joint: Tensor, entropy: Tensor, depth: int | Tensor) -> Tensor:
    """[B, 3] float32 in the order of ``FeatureSpec.names``."""
    if not isinstance(depth, Tensor):
        depth = torch.full_like(joint, float(depth))
    return torch.stack((joint.float(), entropy.float(), depth.float()), dim=-1)

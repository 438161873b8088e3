"""Two rules on the entropy H of the draft model's distribution, in nats over its vocabulary.

Gunjur and Waitz, "Fast Inference with Dynamic Tree Speculative Decoding" (Stanford CS). The paper
names no unit; both thresholds are read as nats.

Entropy stop ("early stopping", section 3.1 and Figure 5a, threshold 1 there): keep = H_i <=
max_entropy. Sampled drafts: safe to drop, because H_i is a function of the distribution alone.

Entropy width (section 4): the flatter a distribution, the more of its tokens enter the tree. A row
keeps its w(H) most likely children::

    w(H) = 1 if H < 0.02;  2 if H < 1;  min(ceil(4 H), 7) otherwise

The best result has a fixed depth of four (``--speculative-num-steps 4``). Widths are also capped by
``--speculative-eagle-topk``: 7 or more to follow the paper. ``depth="dynamic"`` ends a path where
H > ``stop_entropy``: branching factor 0 (section 3.2), with the threshold 1 of early stopping. The
functions behind the paper's "dynamic width and depth" are not published; with these two a width is
at most 4, and above 2 only at H = 1 exactly, unless ``stop_entropy`` is raised. The paper forwards
every node; here a layer forwards its K most likely ones. Sampled drafts: keep-then-stop, because
beams and caps go by the drawn tokens' joint probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_c2t.checks import is_number, require
from sglang_c2t.policies.base import DraftLayer, Growth, TreeLayer, TreeShape

DEPTHS = ("fixed", "dynamic")


def _require_nats(name: str, value: Any) -> None:
    require(is_number(value) and value >= 0, f"policy {name}", "a number of nats >= 0", value)


@dataclass(frozen=True)
class Entropy:
    """Threshold on the entropy the token was drawn from."""

    max_entropy: float = 1.0  # nats
    name: ClassVar[str] = "entropy"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Reject what is no entropy."""
        _require_nats("entropy: max_entropy", self.max_entropy)

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: the entropy does not exceed the threshold."""
        return layer.entropy <= self.max_entropy


def branching_factor(entropy: Tensor) -> Tensor:
    """int64, shaped like ``entropy`` (nats): the paper's w(H), in [1, 7].

    0.01 -> 1, 0.5 -> 2, 1.3 -> 6, 3.0 -> 7.
    """
    wide = (entropy * 4).ceil().clamp(max=7).long()
    narrow = (entropy >= 0.02).long() + 1
    return torch.where(entropy < 1, narrow, wide)


@dataclass(frozen=True)
class EntropyWidth:
    """Children in number by the entropy of the distribution they come from."""

    depth: str = "fixed"
    stop_entropy: float = 1.0  # nats; read by depth="dynamic" only
    name: ClassVar[str] = "entropy-width"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Reject unknown depths and what is no entropy."""
        known = f"one of {', '.join(DEPTHS)}"
        require(self.depth in DEPTHS, "policy entropy-width: depth", known, self.depth)
        _require_nats("entropy-width: stop_entropy", self.stop_entropy)

    def check(self, shape: TreeShape) -> None:
        """Any shape will do; a topk below 7 narrows the widest rows."""

    def grow(self, layer: TreeLayer) -> Growth:
        """The first w(H) children of each row, ranked by joint probability."""
        entropy = layer.entropy
        width = branching_factor(entropy)
        if self.depth == "dynamic":
            width = width.masked_fill(entropy > self.stop_entropy, 0)
        child = torch.arange(layer.topk, device=entropy.device)
        key = layer.joint.masked_fill(child >= width, -torch.inf)
        return Growth(key=key, expand=key)

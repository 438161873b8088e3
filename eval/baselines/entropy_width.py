"""Entropy width: the flatter a draft distribution, the more of its tokens enter the tree.

A row whose distribution has entropy H keeps its w(H) most likely children::

    w(H) = 1 if H < 0.02;  2 if H < 1;  min(ceil(4 H), 7) otherwise

Gunjur and Waitz, "Fast Inference with Dynamic Tree Speculative Decoding" (Stanford CS),
section 4. The paper names no unit; read as nats, as its threshold of 1 is in ``entropy``.
Its best result has a fixed depth of four (``--speculative-num-steps 4``). Widths are also
capped by ``--speculative-eagle-topk``: 7 or more to follow the paper.

``depth="dynamic"`` ends a path where H > ``stop_entropy``: branching factor 0 (section 3.2),
with the threshold 1 of the paper's early stopping (section 3.1). The functions behind its
"dynamic width and depth" are not published; with these two a width is at most 4, and above
2 only at H = 1 exactly, unless ``stop_entropy`` is raised.

The paper forwards every node; here a layer forwards its K most likely ones.

Sampled drafts: keep-then-stop, because beams and caps go by the drawn tokens' joint
probability; the width itself is a function of the distribution alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_c2t.checks import is_number, require
from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape

DEPTHS = ("fixed", "dynamic")


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
        require(
            self.depth in DEPTHS,
            "policy entropy-width: depth",
            f"one of {', '.join(DEPTHS)}",
            self.depth,
        )
        require(
            is_number(self.stop_entropy) and self.stop_entropy >= 0,
            "policy entropy-width: stop_entropy",
            "a number of nats >= 0",
            self.stop_entropy,
        )

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

"""Fork: several first tokens, and behind each a chain.

Layer 1 keeps the ``width`` most likely tokens, deeper layers the most likely child of each
row: width x depth nodes, a size that grows linearly with depth. The shape of Lu et al.,
"Improving Multi-candidate Speculative Decoding" (arXiv:2409.10644), sections 3.1 and 3.2,
there 16 wide and 5 deep (section 4.1); its decision models are ``mcsd``.

First tokens. The paper samples them from the *target* ("target initialised"), at the price
of one more target forward. SGLang has already committed one target sample per round, the
root of the next draft. A second sample beside it could never be accepted: choosing between
them by the length of what follows would change the distribution. The lossless form defers the
sample: it makes the target's k most likely tokens children of the last accepted one and draws
among them at verification. It brings nothing: where the sample is one of the k, it reaches what
the committed form reaches with more rows, and where it is none, it takes a forward more. So the
draft-initialised form is here, with distinct first tokens behind the committed sample.

Sliced mask (section 3.2). The paper builds one mask and cuts it where drafting stops. Here
nodes are numbered layer by layer, branch by branch, so that the mask of a fork of depth d is
the leading block of 1 + width x d rows and columns of any deeper fork's.

Where a cap or a budget of the batch bites, the least likely branches lose their tails: nodes
rank by joint probability.

Sampled drafts: safe to drop while no cap bites, because the shape depends on no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_c2t.checks import ConfigError, is_whole, require
from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape


@dataclass(frozen=True)
class Fork:
    """``width`` chains with distinct first tokens; ``None``: as many as topk."""

    width: int | None = None
    name: ClassVar[str] = "fork"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Reject a width that is no count."""
        require(
            self.width is None or is_whole(self.width, 1),
            "policy fork: width",
            "a whole number >= 1",
            self.width,
        )

    def check(self, shape: TreeShape) -> None:
        """Refuse a fork that is wider than the draft's layers."""
        if self.width is not None and self.width > shape.topk:
            raise ConfigError(
                f"policy fork: width {self.width} needs --speculative-eagle-topk {self.width} "
                f"or more, got {shape.topk}"
            )

    def grow(self, layer: TreeLayer) -> Growth:
        """First layer: the first ``width`` children. Behind it: the first child of each row."""
        joint = layer.joint
        width = layer.topk if self.width is None else self.width
        child = torch.arange(layer.topk, device=joint.device)
        beyond = child >= (width if layer.depth == 1 else 1)
        # Tines keep their order from layer to layer.
        place = torch.arange(joint[0].numel(), device=joint.device).view(joint[0].shape)
        expand = (-place.float()).expand_as(joint).masked_fill(beyond, -torch.inf)
        return Growth(key=joint.masked_fill(beyond, -torch.inf), expand=expand)

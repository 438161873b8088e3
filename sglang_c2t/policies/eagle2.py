"""EAGLE-2: expand the K most likely nodes of a layer, verify the N most likely of all.

value(node) = product of q along its path (arXiv:2406.16858, sections 4.1 and 4.2). Each layer
forwards its K nodes of largest value. Reranking keeps the N largest, of equal ones the shallower.
Every tree has the same size. SGLang's own tree drafting is this rule. Ours breaks ties by order, so
that a tree always holds its nodes' ancestors.

Sampled drafts: keep-then-stop, because the value contains the drawn token's probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape


@dataclass(frozen=True)
class EAGLE2:
    """Rank by joint draft probability; N is ``--speculative-num-draft-tokens``."""

    name: ClassVar[str] = "eagle2"
    needs: ClassVar[frozenset[str]] = frozenset()

    def check(self, shape: TreeShape) -> None:
        """Accept any shape."""

    def grow(self, layer: TreeLayer) -> Growth:
        """Rank all nodes by joint probability."""
        return Growth(key=layer.joint, expand=layer.joint)

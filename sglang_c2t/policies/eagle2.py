"""EAGLE-2: expand the K most likely nodes of a layer, verify the N most likely of all.

value(node) = product of q along its path (arXiv:2406.16858, sections 4.1 and 4.2): each
layer forwards its K nodes of largest value, and reranking keeps the N largest, of equals
the shallower. Every tree has the same size. SGLang's own tree drafting is this rule; ours
breaks ties by order, so that a tree always holds its nodes' ancestors.

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
        """Any shape will do."""

    def grow(self, layer: TreeLayer) -> Growth:
        """Everything is a candidate, ranked by joint probability."""
        return Growth(key=layer.joint, expand=layer.joint)

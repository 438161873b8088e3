"""C2T-plus: C2T-log that also sees how sure the draft is of the token itself.

C_i = F(log P_i, m_i, H_i, d_i), keep = C_i >= beta, with m_i the log ratio of the two most
likely draft tokens; 4-48-1, 289 parameters. Ours. The joint probability does not say
whether a chain is unlikely because of this token or of an earlier one; with the margin
beside it the network can tell. All inputs come from the draft's own distribution, so a
classifier still moves between draft models (C2T, arXiv:2502.13652, is the frame).

In trees it may read the token's rank among its siblings and its parent's among the rows that were
forwarded, too (6-48-1, 385 parameters): what else the tree offers says how likely this node is, and
both are known without measuring anything. Others that were tried bring about as much, and would
have to be carried from layer to layer or counted over a whole one (eval/LOG.md).

Default threshold, chains: chosen as that of C2T-log is.

Sampled drafts: keep-then-stop, because P_i contains the probability of the drawn token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_c2t.draft_layer import PLACES
from sglang_c2t.policies.c2t import C2T


@dataclass(frozen=True)
class C2TPlus(C2T):
    """Confidence gate with a classifier that also reads the token's top-2 margin."""

    beta: float = 0.24  # accepts what c2t does at 0.5: eval/tables/thresholds.py
    name: ClassVar[str] = "c2t-plus"
    tree_beta: ClassVar[float] = 0.03  # ours: about a dozen nodes on the demo models
    reads: ClassVar[frozenset[str]] = (
        frozenset({"log_joint", "margin", "entropy", "depth"}) | PLACES
    )

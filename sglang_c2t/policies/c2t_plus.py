"""C2T-plus: C2T-log with the draft's top-2 margin of the token as a further input.

C_i = F(log P_i, m_i, H_i, d_i), keep = C_i >= beta, with m_i the log ratio of the two most likely
draft tokens; 4-48-1, 289 parameters. Ours, in the frame of C2T (arXiv:2502.13652). The joint
probability does not show whether this token or an earlier one makes a chain unlikely; the margin
does. All inputs come from the draft's own distribution, so a classifier works for other drafts.

In trees it may also read the ranks of the token among its siblings and of its parent among the
forwarded rows (6-48-1, 385 parameters). Both are known without a measurement. Other inputs brought
about as much, and would need state across layers or a count over a whole one (eval/LOG.md).

Default threshold for chains: chosen as for C2T-log.

Sampled drafts: keep-then-stop, because P_i contains the probability of the drawn token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_c2t.draft_layer import PLACES
from sglang_c2t.policies.c2t import C2T


@dataclass(frozen=True)
class C2TPlus(C2T):
    """Gate with a classifier that also reads the token's top-2 margin."""

    beta: float = 0.24  # accepts what c2t does at 0.5: eval/tables/thresholds.py
    name: ClassVar[str] = "c2t-plus"
    tree_beta: ClassVar[float] = 0.03  # ours: about a dozen nodes on the demo models
    reads: ClassVar[frozenset[str]] = (
        frozenset({"log_joint", "margin", "entropy", "depth"}) | PLACES
    )

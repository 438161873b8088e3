"""C2T-log: C2T's rule with the logarithm of the joint probability as first input.

C_i = F(log P_i, H_i, d_i), keep = C_i >= beta. Ours; the network is C2T's (arXiv:2502.13652),
3-48-1, 241 parameters. It is trained on all rejected tokens instead of a sample, so C_i is a
probability and beta means the same for every draft model. Raw joint probabilities of deep tokens
crowd near zero, where the network cannot separate them. Their logarithms differ.

Default threshold for chains: the shipped classifier then accepts as much as ``c2t`` at its
published 0.5, and verifies fewer drafts (``eval/tables/thresholds.py``, on the demo drafts'
training prompts). At 0.5 it would accept less. ``c2t`` learns from as many accepted as
rejected tokens, so its 0.5 means "as likely as the average recorded token". About a quarter of
these is accepted.

Sampled drafts: keep-then-stop, because P_i contains the probability of the drawn token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_c2t.policies.c2t import C2T


@dataclass(frozen=True)
class C2TLog(C2T):
    """Gate with a classifier that reads the log joint probability."""

    beta: float = 0.24  # accepts what c2t does at 0.5: eval/tables/thresholds.py
    name: ClassVar[str] = "c2t-log"
    tree_beta: ClassVar[float] = 0.03  # ours: about a dozen nodes on the demo models
    reads: ClassVar[frozenset[str]] = frozenset({"log_joint", "entropy", "depth"})

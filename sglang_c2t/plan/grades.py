"""Confidences of verified drafts, and how many of those drafts survived.

Legend: n drafts, D rows (one, or one per depth).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_c2t.plan.survival import Array, Numbers

#: Bins of equal width over [0, 1].
BINS = 20

#: Standard errors of a 95 % interval.
SURE = 1.96


class Summary(NamedTuple):
    """Calibration and ranking over all drafts."""

    drafts: float
    promised: float  # mean confidence
    survived: float  # share
    auc: float  # 0.5 is chance
    auc_error: float  # standard error

    @property
    def error(self) -> float:
        """Half the 95 % interval of the share that survived (Agresti-Coull: never 0)."""
        share = (self.survived * self.drafts + 2.0) / (self.drafts + 4.0)
        return SURE * math.sqrt(share * (1.0 - share) / (self.drafts + 4.0))


class Grades:
    """Counts of verified drafts in bins of confidence: drafts, sum of confidences, survivors. A
    calibrated gate has equal sums of confidences and survivors. A gate that ranks drafts well has
    its survivors in the upper bins, even if it is not calibrated.
    """

    def __init__(self, num_rows: int = 1) -> None:
        self.counts = np.zeros((3, num_rows, BINS))

    def observe(self, confidence: Array, survived: Numbers, row: Numbers | int = 0) -> None:
        """Count drafts by ``confidence`` [n], each in its ``row``. It skips values outside [0, 1]
        and nan, which a broken classifier may give.
        """
        sane = (confidence >= 0.0) & (confidence <= 1.0)
        row = np.broadcast_to(row, confidence.shape)[sane]
        confidence, survived = confidence[sane], survived[sane]
        bins = row * BINS + np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        kinds = np.ones(len(bins)), confidence, survived
        size = self.counts[0].size
        added = [np.bincount(bins, weights, minlength=size) for weights in kinds]
        self.counts += np.reshape(added, self.counts.shape)

    def reset(self) -> None:
        """Forget everything."""
        self.counts[:] = 0.0

    def errors(self) -> list[float]:
        """Return the expected calibration error of each row."""
        drafts, promised, survived = self.counts
        total = np.maximum(drafts.sum(axis=1), 1.0)
        return list((np.abs(promised - survived).sum(axis=1) / total).tolist())

    def to_dict(self) -> dict[str, Any]:
        """Return counts by name, each [BINS], or [D, BINS] for several rows; for JSON."""
        counts = self.counts if self.counts.shape[1] > 1 else self.counts[:, 0]
        return dict(zip(("drafts", "promised", "survived"), counts.tolist(), strict=True))


def summary(told: Sequence[Mapping[str, Sequence[float]]]) -> Summary | None:
    """Summarize one-row counts of several schedulers; ``None`` without drafts."""
    if not told:
        return None
    drafts, promised, survived = (
        np.sum([one[name] for one in told], axis=0) for name in ("drafts", "promised", "survived")
    )
    total, good = float(drafts.sum()), float(survived.sum())
    if total == 0.0:
        return None
    bad = drafts - survived
    # The order within a bin is unknown: count half of its pairs as ordered.
    below = np.cumsum(bad) - bad
    pairs = good * float(bad.sum())
    auc = float((survived * (below + 0.5 * bad)).sum()) / pairs if pairs else 1.0
    fewer = max(min(good, float(bad.sum())), 1.0)
    error = math.sqrt(max(auc * (1.0 - auc), 0.01) / fewer)
    return Summary(total, float(promised.sum()) / total, good / total, auc, error)

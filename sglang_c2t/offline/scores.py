"""Ranking and calibration of confidences. Pure torch.

Legend: n tokens; ``scores`` [n] float32 confidences, ``labels`` [n] float32 in {0, 1}.
"""

from __future__ import annotations

import torch
from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve; ties count half. nan when one class is missing."""
    positives = labels > 0.5
    num_pos, num_neg = int(positives.sum()), int((~positives).sum())
    if not num_pos or not num_neg:
        return float("nan")
    _, inverse, counts = scores.double().unique(return_inverse=True, return_counts=True)
    # Mean 1-based rank of each tied group of scores (Mann-Whitney).
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = mean_rank[inverse][positives].sum().item()
    return (rank_sum - num_pos * (num_pos + 1) / 2) / (num_pos * num_neg)


def expected_calibration_error(scores: Tensor, labels: Tensor, num_bins: int = 15) -> float:
    """ECE: mean distance of confidence and acceptance over equal-width bins, by tokens."""
    if not scores.numel():
        return float("nan")
    bins = (scores * num_bins).long().clamp(max=num_bins - 1)
    gap = torch.zeros(num_bins, dtype=torch.float64)
    gap.index_add_(0, bins, (scores - labels).double())
    return float(gap.abs().sum() / scores.numel())

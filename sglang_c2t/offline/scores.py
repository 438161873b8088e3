"""How good a confidence is: ranking, calibration, and the paper's tables. Pure torch.

Legend: n tokens; ``scores`` [n] float32 confidences, ``labels`` [n] float32 in {0, 1}.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """How well kept tokens agree with accepted ones; nan where the denominator is zero."""

    accuracy: float
    precision: float  # accepted share of the kept tokens
    recall: float  # kept share of the accepted tokens
    f1: float
    positive_rate: float  # theta of C2T, appendix C.2: kept share of all tokens


@dataclass(frozen=True)
class Bin:
    """Tokens whose score lies in [low, high); the last bin holds 1 too."""

    low: float
    high: float
    tokens: int
    mean_score: float  # nan without tokens
    accept_rate: float  # nan without tokens


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


def rates(kept: Tensor, accepted: Tensor) -> Rates:
    """Compare two [n] bool masks.

    Kept [1, 1, 0, 0], accepted [1, 0, 0, 1]: every rate is 0.5.
    """
    num_kept, num_accepted = int(kept.sum()), int(accepted.sum())
    hits = int((kept & accepted).sum())
    return Rates(
        accuracy=_ratio(int((kept == accepted).sum()), kept.numel()),
        precision=_ratio(hits, num_kept),
        recall=_ratio(hits, num_accepted),
        f1=_ratio(2 * hits, num_kept + num_accepted),
        positive_rate=_ratio(num_kept, kept.numel()),
    )


def reliability(scores: Tensor, labels: Tensor, num_bins: int = 15) -> list[Bin]:
    """Mean confidence and acceptance per equal-width bin, those of the ECE."""
    bins = (scores * num_bins).long().clamp(max=num_bins - 1)
    tokens = bins.bincount(minlength=num_bins)
    sum_score = bins.bincount(scores.double(), minlength=num_bins)
    sum_label = bins.bincount(labels.double(), minlength=num_bins)
    return [
        Bin(i / num_bins, (i + 1) / num_bins, n, _ratio(score, n), _ratio(label, n))
        for i, (n, score, label) in enumerate(
            zip(tokens.tolist(), sum_score.tolist(), sum_label.tolist(), strict=True)
        )
    ]


def _ratio(numerator: float, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")

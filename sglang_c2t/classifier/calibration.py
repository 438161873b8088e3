"""Calibration: make a confidence of 0.7 mean that 7 of 10 such tokens are accepted.

Temperature scaling (one number, Guo et al., arXiv:1706.04599) and isotonic regression (a monotone
step function). Both keep the order of tokens, so a threshold rule gives the same curve of tau over
gamma, with another threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_c2t.config import ConfigError

MAX_KNOTS = 64


class Isotonic(NamedTuple):
    """A monotone map of confidences, linear between its knots."""

    x: Tensor  # [k] float32, ascending
    y: Tensor  # [k] float32, ascending, in [0, 1]

    def __call__(self, confidence: Tensor) -> Tensor:
        """[...] calibrated; beyond the knots the nearest knot's value."""
        x, y = self.x, self.y
        right = torch.searchsorted(x, confidence.contiguous()).clamp(1, len(x) - 1)
        left = right - 1
        share = ((confidence - x[left]) / (x[right] - x[left])).clamp(0, 1)
        # Exact at both ends; y[left] + share * (y[right] - y[left]) is not at the right one.
        return torch.lerp(y[left], y[right], share)

    def to(self, device: torch.device | str) -> Isotonic:
        """Return the same map on ``device``, for confidences there."""
        return Isotonic(self.x.to(device), self.y.to(device))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the T > 0 that minimises the cross-entropy of sigmoid(logits / T); both [n]. Bisection
    on log T: the loss is convex in 1 / T.
    """
    logits, labels = logits.double(), labels.double()
    low, high = -3.0, 3.0  # log T: no sane classifier is off by more than e^3

    def slope(log_t: float) -> float:
        scaled = logits / torch.tensor(log_t).exp()
        return float(((torch.sigmoid(scaled) - labels) * -scaled).mean())

    for _ in range(50):  # bisection: the derivative changes its sign once
        middle = (low + high) / 2
        if slope(middle) < 0:
            low = middle
        else:
            high = middle
    return float(torch.tensor((low + high) / 2).exp())


def fit_isotonic(confidence: Tensor, labels: Tensor) -> Isotonic:
    """Fit isotonic regression of ``labels`` on ``confidence``, both [n], thinned to few knots.
    Raises :class:`ConfigError` when all confidences are equal.
    """
    from scipy.optimize import isotonic_regression  # not in a server: it only applies the map

    # Tokens of one confidence are one point with their mean label, whatever their order.
    x, point, count = confidence.float().unique(return_inverse=True, return_counts=True)
    if len(x) < 2:
        raise ConfigError("all confidences are equal: nothing to calibrate")
    mean = torch.zeros(len(x), dtype=torch.float64).index_add_(0, point, labels.double()) / count
    y = torch.from_numpy(isotonic_regression(mean.numpy(), weights=count.numpy()).x)
    quantiles = torch.linspace(0, len(point) - 1, MAX_KNOTS).round().long()
    knots = point.sort().values[quantiles].unique()
    return Isotonic(x[knots], y[knots].float())

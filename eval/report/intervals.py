"""Confidence intervals: speed ratios over repeats, accept lengths over prompts.

Legend: Q prompts, S resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd
from scipy.stats import t as student

from sglang_c2t.offline.curves import Array, interval, resamples

LEVEL = 0.95
NUM_RESAMPLES = 1000

Verdict = Literal["win", "loss", "tie", ""]


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; ``low`` and ``high`` are nan without an interval."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        """Whether ``low`` and ``high`` are numbers."""
        return not math.isnan(self.low)

    @property
    def verdict(self) -> Verdict:
        """Outcome as a ratio: win above 1, loss below 1, tie across 1, empty without interval."""
        if not self.has_interval:
            return ""
        return "win" if self.low > 1 else "loss" if self.high < 1 else "tie"

    def text(self, digits: int = 2) -> str:
        """``2.31 [2.25, 2.38]``, or the number alone."""
        value, low, high = (f"{x:.{digits}f}" for x in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]" if self.has_interval else value


def noise(logs: pd.DataFrame) -> tuple[float, int] | None:
    """Residual variance of ``logs`` after method and repeat effects, and its degrees of freedom.

    ``logs`` is log speed, repeats by methods, nan where absent. All methods share one variance,
    because two or three repeats of one method say little. For two methods this is the paired t
    test's variance. ``None`` if the effects explain everything.
    """
    cells = logs.stack().dropna()
    factors = cells.index.to_frame(index=False).astype(str)
    factors.columns = ["repeat", "method"]
    design = pd.get_dummies(factors, dtype=float).to_numpy()
    values = cells.to_numpy(dtype=float)
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    freedom = len(values) - int(rank)
    if not freedom:
        return None
    return float(((values - design @ solution) ** 2).sum()) / freedom, freedom


def paired_ratio(logs: pd.DataFrame, method: str, other: str) -> Estimate | None:
    """Geometric mean of speed ratios within repeats; ``None`` if no repeat has both methods."""
    differences = (logs[method] - logs[other]).dropna()
    if differences.empty:
        return None
    mean, n, found = float(differences.mean()), len(differences), noise(logs)
    if n < 2 or found is None:
        return Estimate(math.exp(mean))
    variance, freedom = found
    half = float(student.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(2 * variance / n)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def tau_gamma(counts: pd.DataFrame) -> tuple[Estimate, Estimate] | None:
    """Accept length tau and drafts per verification gamma; ``None`` if nothing was verified.

    ``counts`` has one row per prompt: family, verify, correct, proposed.
    """
    if not counts.verify.sum():
        return None
    # [1 + S, Q]: each prompt once, then drawn.
    weights = np.vstack([np.ones(len(counts)), _draws(tuple(counts.family))])
    sums = weights @ counts[["verify", "correct", "proposed"]].to_numpy(dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        lengths = sums[:, 1:] / sums[:, :1] + [1.0, 0.0]
    tau, gamma = (
        Estimate(float(x[0]), *(interval(x[1:], LEVEL) if np.isfinite(x).all() else ()))
        for x in lengths.T
    )
    return tau, gamma


@lru_cache
def _draws(families: tuple[str, ...]) -> Array:
    """The same resamples for every method, so that their intervals compare."""
    return resamples(families, NUM_RESAMPLES, seed=0)

"""Compare stopping rules at equal accept length, with intervals.

A rule with a threshold has a curve: each threshold gives an accept length tau and a number gamma of
verified drafts. Two rules are compared where their curves reach the same tau. Intervals are
percentiles over resampled requests, within each group of requests. Every rule gets the same
resamples, so that differences are paired.

Legend: T thresholds, Q requests, S resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.offline.replay import Chains, Outcome, replay
from sglang_c2t.policies.base import ChainPolicy

Array = NDArray[np.float64]

#: Thresholds for confidences and probabilities: even in log odds, coarser where few drafts end, and
#: 0. At 0 a rule keeps every draft, so its curve reaches every accept length of full drafts in
#: every resample.
ODDS_GRID = tuple(
    float(x) for x in 1 / (1 + np.exp(-np.r_[-np.inf, np.arange(-16, -8), np.linspace(-8, 6, 57)]))
)


@dataclass(frozen=True)
class Curve:
    """Counts of one rule over its thresholds."""

    num_steps: Array  # [T, Q]
    num_correct: Array  # [T, Q]
    num_proposed: Array  # [T, Q]
    num_drafted: Array  # [T, Q]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Curve:
        """Build a curve from one replay per threshold."""
        names = ("num_steps", "num_correct", "num_proposed", "num_drafted")
        return cls(*(np.stack([getattr(o, n).numpy() for o in outcomes]) for n in names))

    def tau(self, weights: Array) -> Array:
        """[S, T] tokens per verification; ``weights`` is [S, Q]."""
        return 1.0 + (weights @ self.num_correct.T) / (weights @ self.num_steps.T)

    def gamma(self, weights: Array) -> Array:
        """[S, T] drafts verified per verification."""
        return (weights @ self.num_proposed.T) / (weights @ self.num_steps.T)

    def gamma_at(self, tau: Array, weights: Array) -> Array:
        """[S] least gamma at which the curve reaches ``tau`` [S], linear between thresholds. The
        least, because longer drafts do not always accept more: a longer step also starts the next
        one elsewhere. nan if the curve never reaches ``tau``.
        """
        taus, gammas = self.tau(weights), self.gamma(weights)
        order = np.argsort(taus, axis=1, kind="stable")
        taus, gammas = (np.take_along_axis(values, order, axis=1) for values in (taus, gammas))
        gammas = np.minimum.accumulate(gammas[:, ::-1], axis=1)[:, ::-1]  # of those that reach it
        result = np.full(len(tau), np.nan)
        for i in np.flatnonzero(tau <= taus[:, -1]):
            result[i] = np.interp(tau[i], taus[i], gammas[i])
        return result

    def threshold_at(self, tau: float, grid: Sequence[float], weights: Array) -> float:
        """Return the threshold of ``grid`` [T] at which the curve reaches ``tau``, interpolated.
        ``weights`` is [1, Q]. Raises ValueError if the curve never reaches ``tau``.
        """
        taus = self.tau(weights)[0]
        if not taus.min() <= tau <= taus.max():
            raise ValueError(
                f"no threshold gives {tau:.3f} tokens per verification: the curve reaches from "
                f"{taus.min():.3f} to {taus.max():.3f}"
            )
        order = np.argsort(taus, kind="stable")
        return float(np.interp(tau, taus[order], np.array(grid)[order]))


def sweep(
    policy: Callable[[float], ChainPolicy], chains: Chains, grid: Sequence[float] = ODDS_GRID
) -> Curve:
    """Replay ``policy(threshold)`` for every threshold of ``grid``."""
    return Curve.of([replay(policy(threshold), chains) for threshold in grid])


def everyone(groups: Sequence[str], only: str | None = None) -> Array:
    """[1, Q] weights that count each request once, or only those of one group."""
    return np.array([[float(only is None or group == only) for group in groups]])


def resamples(groups: Sequence[str], num: int, seed: int = 0) -> Array:
    """[num, Q] weights: how often each request is drawn, group by group."""
    rng = np.random.default_rng(seed)
    names = np.array(groups)
    weights = np.zeros((num, len(names)))
    for group in sorted(set(groups)):
        members = np.flatnonzero(names == group)
        for row in weights:
            np.add.at(row, rng.choice(members, len(members)), 1.0)
    return weights


def interval(values: Array, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of resampled ``values`` [S]; nan if any of them is. Dropping nan would
    bias one end; callers report their number.
    """
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)

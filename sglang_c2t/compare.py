"""Compare stopping rules at equal accept length, with intervals.

A rule with a threshold draws a curve: each threshold gives an accept length tau and a
number gamma of verified drafts. Two rules are compared where their curves reach the same
tau. Intervals are percentiles over resampled requests, within each group of requests, the
same resamples for every rule, so that differences are paired.

Legend: T thresholds, Q requests, S resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.replay import Chains, Outcome, replay

Array = NDArray[np.float64]

#: Where confidences, probabilities and products of them are cut: even in log odds.
ODDS_GRID = tuple(float(x) for x in 1 / (1 + np.exp(-np.linspace(-8, 6, 57))))
#: Nats.
ENTROPY_GRID = tuple(float(x) for x in np.exp(np.linspace(-5, 2, 57)))


@dataclass(frozen=True)
class Curve:
    """Counts of one rule over its thresholds."""

    num_steps: Array  # [T, Q]
    num_correct: Array  # [T, Q]
    num_verified: Array  # [T, Q]
    num_drafted: Array  # [T, Q]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Curve:
        """From one replay per threshold."""
        names = ("num_steps", "num_correct", "num_verified", "num_drafted")
        return cls(*(np.stack([getattr(o, n).numpy() for o in outcomes]) for n in names))

    def tau(self, weights: Array) -> Array:
        """[S, T] tokens per verification; ``weights`` is [S, Q]."""
        return 1.0 + (weights @ self.num_correct.T) / (weights @ self.num_steps.T)

    def gamma(self, weights: Array) -> Array:
        """[S, T] drafts verified per verification."""
        return (weights @ self.num_verified.T) / (weights @ self.num_steps.T)

    def gamma_at(self, tau: Array, weights: Array) -> Array:
        """[S] gamma where the curve reaches ``tau`` [S], linear between thresholds; nan where
        it never does.
        """
        taus, gammas = self.tau(weights), self.gamma(weights)
        result = np.full(len(tau), np.nan)
        for i, wanted in enumerate(tau):
            order = np.argsort(taus[i], kind="stable")
            if wanted <= taus[i].max():
                result[i] = np.interp(wanted, taus[i][order], gammas[i][order])
        return result


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
    """Percentile interval of resampled ``values`` [S]; nan if any of them is."""
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)

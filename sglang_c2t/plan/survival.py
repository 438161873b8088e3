"""Survival of a draft: the probability that it and all drafts before it are accepted.

A classifier ranks drafts well, but its numbers are no probabilities. It learnt from other traffic
with balanced classes, and its output drifts with the traffic. The server sees the outcome of every
verified draft, so it calibrates the confidence while it serves.

Legend: D depths, K bins, n drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.restored import numbers

Array = NDArray[np.float64]

#: Arrays of any numeric type, which callees only read.
Numbers = NDArray[Any]

#: Confidences are clipped to log odds within +-LIMIT: 0.0025 to 0.9975.
LIMIT = 6.0

#: K, equal steps of the log odds.
NUM_BINS = 24
_WIDTH = 2 * LIMIT / NUM_BINS
_MIDDLES = -LIMIT + _WIDTH * (np.arange(NUM_BINS) + 0.5)

#: Weight of the confidence itself, in drafts per bin.
PRIOR_DRAFTS = 8.0

#: Drafts of a depth after which an observation counts half.
HALF_LIFE = 20_000.0

#: Bounds for a file: drafts in a bin, and slope of the log odds.
MOST_DRAFTS = 1e9
STEEPEST = 1e4

_LEAST = 1.0 / (1.0 + np.exp(LIMIT))

#: Rounding error of a sum of float32 probabilities.
ROUNDING = 1e-4


def as_probabilities(values: Numbers) -> tuple[Array, NDArray[np.bool_]]:
    """Return ``values`` [...] clipped to [0, 1], nan as 0, and a mask of those outside."""
    values = values.astype(np.float64)
    inside = np.fmin(np.fmax(values, 0.0), 1.0)
    with np.errstate(invalid="ignore"):
        return inside, ~(np.abs(values - inside) <= ROUNDING)


class Survival:
    """Survival by depth and confidence, from counts of survivors in bins.

    Every verified draft has a label: it *survives* if it and all before it are accepted. Its
    confidence alone decides whether it is verified, and bins hold one confidence, so the counts are
    unbiased.

    Bins are equal steps of the confidence's log odds. A bin starts with :data:`PRIOR_DRAFTS` drafts
    that survived as often as their confidence predicts. Counts decay with a half-life, so that
    traffic may change. At each depth the values rise with the confidence; neighbours with falling
    counts are pooled. Between the middles of bins the values are interpolated.

    Args:
        max_depth: D.
    """

    by_steps = False
    """Whether it counts steps and must learn from each one separately."""

    def __init__(self, max_depth: int) -> None:
        self._prior = PRIOR_DRAFTS * np.stack([np.ones(NUM_BINS), _sigmoid(_MIDDLES)])
        self._counts = np.zeros((max_depth, 2, NUM_BINS))  # seen, survived
        self._values: Array | None = None

    @property
    def max_depth(self) -> int:
        """D."""
        return len(self._counts)

    def observe(self, depth: Numbers, confidence: Numbers, survived: Numbers) -> None:
        """Learn from n verified drafts: depths from 1, confidences, and whether they survived."""
        bins = self._bins(confidence)
        rows = np.asarray(depth, dtype=np.int64) - 1
        seen = np.bincount(rows, minlength=self.max_depth)
        self._counts *= 0.5 ** (seen / HALF_LIFE)[:, None, None]
        cells, size = rows * NUM_BINS + bins, self.max_depth * NUM_BINS
        new = [np.bincount(cells, minlength=size), np.bincount(cells, survived, size)]
        self._counts += np.reshape(new, (2, self.max_depth, NUM_BINS)).transpose(1, 0, 2)
        self._values = None

    @property
    def values(self) -> Array:
        """[D, K]: survival in the middle of each bin, increasing with it."""
        if self._values is None:
            seen, survived = (self._counts + self._prior).transpose(1, 0, 2)
            self._values = np.stack([rising(s / n, n) for n, s in zip(seen, survived, strict=True)])
        return self._values

    def __call__(self, depth: Numbers, confidence: Numbers) -> Array:
        """Return survival [...] of drafts at ``depth`` [...] from 1 with ``confidence`` [...]."""
        place = (log_odds(confidence) - _MIDDLES[0]) / _WIDTH
        place = np.minimum(np.maximum(place, 0.0), NUM_BINS - 1)
        left = np.minimum(place.astype(np.int64), NUM_BINS - 2)
        share = place - left
        rows = np.asarray(depth, dtype=np.int64) - 1
        low, high = self.values[rows, left], self.values[rows, left + 1]
        return np.asarray(low + share * (high - low))

    def of_chains(self, confidences: Array) -> Array:
        """Return [S, d] survival of chains with ``confidences`` [S, d]. A draft fails with its
        parent: its confidence is the least one up to it, and its survival is at most its parent's.
        """
        depths = 1 + np.arange(confidences.shape[1])
        least = np.minimum.accumulate(confidences, axis=1)
        return np.minimum.accumulate(self(depths, least), axis=1)

    def learn(self, confidences: Array, num_drafts: Numbers, num_correct: Numbers) -> None:
        """Learn from chains with ``confidences`` [S, d]. ``num_drafts`` [S] of their drafts were
        verified and ``num_correct`` [S] accepted.
        """
        depths = np.broadcast_to(1 + np.arange(confidences.shape[1]), confidences.shape)
        verified = depths <= num_drafts[:, None]
        survived = depths <= num_correct[:, None]
        least = np.minimum.accumulate(confidences, axis=1)
        self.observe(depths[verified], least[verified], survived[verified])

    def parameters(self) -> list[Array]:
        """Return tables with which a device computes :meth:`of_chains`: values [D, K]."""
        return [self.values]

    def state(self) -> dict[str, Any]:
        """Return the learnt counts, for JSON."""
        return {"counts": self._counts.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`. Raises ValueError if it has other depths or bins, or
        invalid counts.
        """
        counts = numbers("counts", state["counts"], 0.0, MOST_DRAFTS, self._counts.shape)
        if (counts[:, 1] > counts[:, 0] + 1e-9).any():
            raise ValueError("numbers that are no counts")
        self._counts, self._values = counts, None

    def reset(self) -> None:
        """Forget everything."""
        self._counts[:] = 0.0
        self._values = None

    def _bins(self, confidence: Array) -> NDArray[np.int64]:
        place = ((log_odds(confidence) + LIMIT) / _WIDTH).astype(np.int64)
        return np.minimum(np.maximum(place, 0), NUM_BINS - 1)


class OneSlope:
    """vLLM's estimator of acceptance, with the update of its adaptive verification.

    p_k = sigmoid(s f + b_k) estimates the acceptance of a draft if those before it are accepted.
    The feature f is the log odds of its largest probability, s a slope, b_k an intercept per depth.
    Survival is the running product. Verified drafts up to the first rejected one have a label.
    Every :data:`EVERY` steps it makes one Newton step of the ridge-penalised likelihood, shortened
    if there are few drafts. (vllm-project/vllm pull requests 47808 and 52228.)

    Args:
        max_depth: D.
    """

    by_steps = True

    EVERY = 100
    RIDGE = 1e-3
    SHORTENING = 50.0
    LARGEST = 40.0

    def __init__(self, max_depth: int) -> None:
        self.intercepts = np.empty(max_depth)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.slope = 0.5
        self.intercepts = np.full(len(self.intercepts), -0.2)
        self._window: list[tuple[NDArray[np.int64], Array, Array]] = []
        self._steps = 0

    def accepts(self, depth: Numbers, prob: Numbers) -> Array:
        """[...]: probability that a draft of ``depth`` is accepted if those before it are."""
        rows = np.asarray(depth, dtype=np.int64) - 1
        return _sigmoid(self.slope * self._feature(prob) + self.intercepts[rows])

    def observe(self, depth: Numbers, prob: Numbers, accepted: Numbers) -> None:
        """Add a step: its verified drafts [n] up to each chain's first rejected one."""
        rows = np.asarray(depth, dtype=np.int64) - 1
        self._window.append((rows, self._feature(prob), np.asarray(accepted, dtype=np.float64)))
        self._steps += 1
        if self._steps % self.EVERY == 0:
            self._newton(*map(np.concatenate, zip(*self._window, strict=True)))
            self._window.clear()

    def of_chains(self, confidences: Array) -> Array:
        """[S, d] survival of chains whose largest probabilities are ``confidences`` [S, d]."""
        depths = 1 + np.arange(confidences.shape[1])
        return self.accepts(depths, confidences).cumprod(axis=1)

    def learn(self, confidences: Array, num_drafts: Numbers, num_correct: Numbers) -> None:
        """Learn from a step; see :meth:`Survival.learn`."""
        depths = np.broadcast_to(1 + np.arange(confidences.shape[1]), confidences.shape)
        labelled = depths <= np.minimum(num_drafts, num_correct + 1)[:, None]
        accepted = depths <= num_correct[:, None]
        self.observe(depths[labelled], confidences[labelled], accepted[labelled])

    def parameters(self) -> list[Array]:
        """Tables with which a device computes :meth:`of_chains`: slope [1], intercepts [D]."""
        return [np.array([self.slope]), self.intercepts]

    def state(self) -> dict[str, Any]:
        """Return the learnt parameters, for JSON."""
        return {"slope": self.slope, "intercepts": self.intercepts.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`; ValueError if it has other depths."""
        slope = float(numbers("slope", state["slope"], 0.0, STEEPEST, ()))
        shape = self.intercepts.shape
        intercepts = numbers("intercepts", state["intercepts"], -STEEPEST, STEEPEST, shape)
        self.slope, self.intercepts = slope, intercepts

    def _feature(self, prob: Array) -> Array:
        prob = np.asarray(prob, dtype=np.float64)
        with np.errstate(divide="ignore"):
            odds = np.log(prob) - np.log1p(-prob)
        return np.clip(odds, -self.LARGEST, self.LARGEST)

    def _newton(self, rows: NDArray[np.int64], feature: Array, label: Array) -> None:
        if not len(rows):
            return
        depths = len(self.intercepts)
        inputs = np.zeros((len(rows), 1 + depths))  # the slope's column, then one per depth
        inputs[:, 0] = feature
        inputs[np.arange(len(rows)), 1 + rows] = 1.0
        now = np.concatenate(([self.slope], self.intercepts))
        guess = _sigmoid(inputs @ now)
        weight = guess * (1.0 - guess)
        gradient = inputs.T @ (label - guess) - self.RIDGE * now
        curvature = (inputs * weight[:, None]).T @ inputs + self.RIDGE * np.eye(1 + depths)
        step = np.linalg.solve(curvature, gradient)
        new = now + step * len(rows) / (len(rows) + self.SHORTENING)
        self.slope, self.intercepts = max(float(new[0]), 0.0), new[1:]


def log_odds(confidence: Array) -> Array:
    """Return the log odds [...], clipped to +-:data:`LIMIT`."""
    inside = np.minimum(np.maximum(confidence, _LEAST), 1.0 - _LEAST)
    return np.asarray(np.log(inside / (1.0 - inside)))


def rising(values: Array, weights: Array) -> Array:
    """Return [K]: the nearest increasing sequence by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n, i), (b, m, j) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m, i + j)]
    return np.repeat([mean for mean, _, _ in pools], [many for _, _, many in pools])


def _sigmoid(x: Any) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * np.asarray(x))))

"""Intervals of a report: ratios of speeds over repeats, accept lengths over prompts.

Legend: Q prompts, S resamples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_ind

from eval.report.document import Mark
from sglang_c2t.offline.compare import Array, Curve, everyone, interval, resamples

LEVEL = 0.95
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; the interval is nan where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        """Whether there is one."""
        return not math.isnan(self.low)

    def text(self, digits: int = 2) -> str:
        """``2.31 [2.25, 2.38]``, or the number alone."""
        text = f"{self.value:.{digits}f}"
        if not self.has_interval:
            return text
        return f"{text} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


Logs = Mapping[int, float]  # logarithm of a speed, by repeat


@dataclass(frozen=True)
class Noise:
    """Variance of one logarithm of a speed that neither method nor repeat explains."""

    variance: float
    freedom: int

    @classmethod
    def of(cls, speeds: Mapping[str, Logs]) -> Noise | None:
        """Of all methods together, as of a block design whose blocks are the repeats.

        Two or three repeats tell little of one method's noise. With two methods this is the
        paired t test's. None where method and repeat explain everything.
        """
        methods = {name: i for i, name in enumerate(speeds)}
        repeats = sorted({repeat for logs in speeds.values() for repeat in logs})
        cells = [(methods[name], repeats.index(repeat), log)
                 for name, logs in speeds.items() for repeat, log in logs.items()]  # fmt: skip
        design = np.zeros((len(cells), len(methods) + len(repeats)))
        for row, (method, repeat, _) in zip(design, cells, strict=True):
            row[[method, len(methods) + repeat]] = 1.0
        values = np.array([log for _, _, log in cells])
        solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        freedom = len(cells) - int(rank)
        if not freedom:
            return None
        return cls(float(((values - design @ solution) ** 2).sum()) / freedom, freedom)


@dataclass(frozen=True)
class Ratio(Estimate):
    """A geometric mean of ratios of speeds, with a t interval on its logarithm."""

    n: int = 1

    @property
    def mark(self) -> Mark:
        """Win or loss where the interval excludes 1, tie where it holds it, plain without one."""
        if not self.has_interval:
            return Mark.PLAIN
        return Mark.WIN if self.low > 1 else Mark.LOSS if self.high < 1 else Mark.TIE

    @classmethod
    def paired(cls, ours: Logs, theirs: Logs, noise: Noise | None) -> Ratio | None:
        """Of two methods, over the repeats that both have; None where there is none.

        A repeat that was slow for both leaves their ratio as it is.
        """
        logs = [log - theirs[repeat] for repeat, log in ours.items() if repeat in theirs]
        if not logs:
            return None
        mean, n = statistics.fmean(logs), len(logs)
        if n < 2 or noise is None:
            return cls(math.exp(mean), n=n)
        quantile = float(student.ppf((1 + LEVEL) / 2, noise.freedom))
        half = quantile * math.sqrt(2 * noise.variance / n)
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n=n)

    @classmethod
    def unpaired(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        """Of two independent sets of speeds: Welch's interval on the logarithms."""
        ups, downs = np.log(above), np.log(below)
        mean, n = float(ups.mean() - downs.mean()), min(len(ups), len(downs))
        if n < 2:
            return cls(math.exp(mean), n=n)
        if ups.var() + downs.var() == 0:
            return cls(math.exp(mean), math.exp(mean), math.exp(mean), n=n)
        low, high = ttest_ind(ups, downs, equal_var=False).confidence_interval(LEVEL)
        return cls(math.exp(mean), math.exp(low), math.exp(high), n=n)


@dataclass(frozen=True)
class Counts:
    """What speculation did, summed per prompt."""

    families: tuple[str, ...]  # [Q]
    verify_ct: Array  # [Q]
    correct: Array  # [Q]
    proposed: Array  # [Q]

    def __add__(self, other: Counts) -> Counts:
        assert self.families == other.families
        names = ("verify_ct", "correct", "proposed")
        return Counts(self.families, *(getattr(self, n) + getattr(other, n) for n in names))

    def of_family(self, family: str) -> Counts:
        """Those of one family alone."""
        ours = np.array([name == family for name in self.families])
        families = tuple(name for name in self.families if name == family)
        return Counts(families, self.verify_ct[ours], self.correct[ours], self.proposed[ours])

    @property
    def curve(self) -> Curve:
        """As a curve of one point, which knows tau and gamma of weighted prompts."""
        counts = (self.verify_ct, self.correct, self.proposed, self.proposed)
        return Curve(*(array[None, :] for array in counts))

    def tau(self, weights: Array) -> Array:
        """[S] tokens per verification, bonus included; ``weights`` is [S, Q]."""
        return self.curve.tau(weights)[:, 0]

    def gamma(self, weights: Array) -> Array:
        """[S] drafts verified per verification."""
        return self.curve.gamma(weights)[:, 0]


@dataclass(frozen=True)
class Acceptance:
    """Accept length tau and gamma with intervals over prompts."""

    tau: Estimate
    gamma: Estimate | None


def acceptance(counts: Counts) -> Acceptance | None:
    """Of all prompts; None where nothing was verified."""
    if not counts.verify_ct.sum():
        return None
    return Acceptance(_estimate(counts, "tau"), _estimate(counts, "gamma"))


def difference(ours: Counts, theirs: Counts, which: str, *, paired: bool) -> Estimate:
    """Accept length tau or gamma of ``ours`` less that of ``theirs``.

    ``paired``: both answered the same prompts, and each resample draws the same ones of both.
    """
    assert not paired or ours.families == theirs.families
    once = _value(ours, which) - _value(theirs, which)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = getattr(ours, which)(_draws(ours.families))
        drawn = drawn - getattr(theirs, which)(_draws(theirs.families, seed=0 if paired else 1))
    return Estimate(once, *_finite_interval(drawn))


def _value(counts: Counts, which: str) -> float:
    return float(getattr(counts, which)(everyone(counts.families))[0])


def _estimate(counts: Counts, which: str) -> Estimate:
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = getattr(counts, which)(_draws(counts.families))
    return Estimate(_value(counts, which), *_finite_interval(drawn))


def _finite_interval(drawn: Array) -> tuple[float, float]:
    """No interval where a resample verified nothing."""
    return interval(drawn, LEVEL) if np.isfinite(drawn).all() else (math.nan, math.nan)


@lru_cache
def _draws(families: tuple[str, ...], seed: int = 0) -> Array:
    """The same resamples for every method, so that their intervals are comparable."""
    return resamples(families, NUM_RESAMPLES, seed)

"""Does a classifier pay on recorded drafts, and which threshold gives the accept length wanted.

It pays where, at equal accept length, the target verifies fewer drafts than under the best rule
that needs no classifier: a threshold on the joint probability, or one length for all. That is
work, not time: what a verified draft costs depends on the load.

Legend: T thresholds, Q requests, S resamples, as in :mod:`~sglang_c2t.offline.compare`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sglang_c2t.config import ConfigError
from sglang_c2t.offline.compare import ODDS_GRID, Array, Curve, everyone, interval, resamples, sweep
from sglang_c2t.offline.evaluation import Report, Scored, decide, threshold_for
from sglang_c2t.offline.replay import Chains, Outcome, left_out_line, replay
from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.fixed import Fixed

#: Of the accept length of whole drafts, what is wanted unless another one is named; and of the
#: accepted tokens, what is to be kept where nothing can be replayed.
WANTED_SHARE = 0.98
#: Calibration error from which on confidences are called uncalibrated: off by five points. Ours.
CALIBRATED = 0.05
NUM_RESAMPLES = 1000

#: The family of requests whose names are not known: see ``request_names.py``.
UNNAMED = "unnamed requests"


@dataclass(frozen=True)
class Setting:
    """A rule as it would be served, and what it does on the recording."""

    rule: str
    setting: str  # its threshold or length in words
    flags: str
    tau: float
    gamma: float
    drafted: float

    @classmethod
    def of(cls, rule: str, setting: str, flags: str, outcome: Outcome) -> Setting:
        """With what a replay counted."""
        told = outcome.accept_length(), outcome.gamma(), outcome.drafted_length()
        return cls(rule, setting, flags, *told)


@dataclass(frozen=True)
class Verdict:
    """How a classifier stands to the best rule without one, at one accept length."""

    wanted: float  # tau
    whole: float  # tau of whole drafts
    mine: Setting
    rival: Setting
    change: float  # of the drafts verified at equal tau, in per cent; below 0 is fewer
    low: float  # of its 95 % interval over requests; nan where there is none
    high: float
    families: dict[str, float]  # the change in each, at its own accept length
    others: tuple[Setting, ...]
    left_out: int = 0  # requests that lack roots

    @property
    def pays(self) -> bool | None:
        """None where the interval does not tell."""
        return True if self.high < 0 else False if self.low > 0 else None

    @property
    def answer(self) -> str:
        """Whether it pays, and by how much."""
        verb = {True: "pays", False: "does not pay", None: "may or may not pay"}[self.pays]
        bounds = "no interval" if math.isnan(self.low) else f"{self.low:+.1f}, {self.high:+.1f}"
        return (
            f"On these recordings this classifier {verb}: {self.change:+.1f} % [{bounds}] drafts "
            f"verified at equal accept length, beside {self.rival.rule}"
        )

    @property
    def sentence(self) -> str:
        """The answer, and what to serve."""
        best = self.mine if self.pays else self.rival
        why = "" if self.pays else ", which needs no classifier"
        return f"{self.answer}{why}. For {self.wanted:.2f} tokens per verification set {best.flags}"

    def lines(self) -> list[str]:
        """The settings beside each other."""
        rows = [("rule", "setting", "tau", "gamma", "drafted")] + [
            (s.rule, s.setting, f"{s.tau:.3f}", f"{s.gamma:.3f}", f"{s.drafted:.3f}")
            for s in (self.mine, self.rival, *self.others)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        shares = [f"{name} {change:+.1f} %" for name, change in self.families.items()]
        return [
            f"For {self.wanted:.3f} tokens per verification "
            f"({100 * self.wanted / self.whole:.0f} % of what whole drafts give; --accept-length "
            "sets another):",
            *(
                "  ".join(
                    cell.ljust(width) if i < 2 else cell.rjust(width)
                    for i, (cell, width) in enumerate(zip(row, widths, strict=True))
                )
                for row in rows
            ),
            "tau: tokens per verification; gamma: drafts verified in each; drafted: made in each.",
            *([f"By family of prompts: {', '.join(shares)}"] if len(shares) > 1 else []),
            *([left_out_line(self.left_out)] if self.left_out else []),
        ]

    def to_json(self) -> dict[str, Any]:
        """For ``report.json``."""
        return asdict(self) | {"pays": self.pays, "sentence": self.sentence}


@dataclass(frozen=True)
class Rule:
    """A rule with a threshold, or a length, and its curve."""

    name: str
    build: Callable[[float], ChainPolicy]
    grid: Sequence[float]
    flags: Callable[[float], str]
    curve: Curve
    whole_numbers: bool = False

    def setting(self, tau: float, chains: Chains) -> Setting:
        """The one with the shortest drafts that was seen to reach ``tau``."""
        for value in self._candidates(tau, chains):
            outcome = replay(self.build(value), chains)
            if outcome.accept_length() >= tau:
                break
        words = f"{value:g} drafts" if self.whole_numbers else f"beta {value:g}"
        return Setting.of(self.name, words, self.flags(value), outcome)

    def _candidates(self, tau: float, chains: Chains) -> list[float]:
        """Where the curve reaches ``tau`` between its thresholds, and all that keep more."""
        if self.whole_numbers:
            return list(self.grid)
        weights = everyone(chains.requests)
        least = float(self.curve.tau(weights).min())
        found = self.curve.threshold_at(max(tau, least), self.grid, weights)
        lower = [beta for beta in reversed(self.grid) if 0 < beta < found]
        return [rounded_down(beta) for beta in (max(found, ODDS_GRID[1]), *lower)]


@dataclass(frozen=True)
class Judge:
    """What is asked of one recording."""

    chains: Chains
    mine: ChainPolicy
    flags: str  # that serve it, but for its threshold
    accept_length: float | None = None  # wanted

    @cached_property
    def families(self) -> list[str]:
        """[Q] of each request, by the name that ``record`` gave it."""
        return [name.rpartition("/")[0].strip() or UNNAMED for name in self.chains.requests]

    @cached_property
    def whole(self) -> Curve:
        """Of whole drafts."""
        return Curve.of([replay(Fixed(), self.chains)])

    def wanted(self, weights: Array) -> Array:
        """[S] the accept length wanted, of these requests."""
        if self.accept_length is not None:
            return np.full(len(weights), self.accept_length)
        return WANTED_SHARE * self.whole.tau(weights)[:, 0]

    @cached_property
    def rules(self) -> tuple[Rule, list[Rule]]:
        """The classifier's, and those that need none."""
        chains, lengths = self.chains, range(1, self.chains.max_length + 1)
        # One call per step: whether a batch stops depends on who is in it.
        grid = ODDS_GRID[::4] if getattr(self.mine, "batch_wide", False) else ODDS_GRID

        def mine(beta: float) -> ChainPolicy:
            return replace(self.mine, beta=beta)  # type: ignore[type-var]

        return Rule(
            "this classifier", mine, grid, lambda beta: f"{self.flags} --c2t-beta {beta:g}",
            sweep(mine, chains, grid),
        ), [
            Rule(
                "the joint probability alone", DyJoint, ODDS_GRID,
                lambda beta: f"--c2t-policy dyjoint --c2t-beta {beta:g}", sweep(DyJoint, chains),
            ),
            Rule(
                "one length for all", lambda n: Fixed(int(n)), [float(n) for n in lengths],
                lambda n: f"--speculative-num-steps {n:g}, without --c2t",
                Curve.of([replay(Fixed(n), chains) for n in lengths]), whole_numbers=True,
            ),
        ]  # fmt: skip

    def verdict(self, others: Mapping[str, ChainPolicy]) -> Verdict:
        """At the accept length wanted; ``others`` are told beside it as they are.

        Raises:
            ConfigError: Not even whole drafts reach the accept length.
        """
        once = everyone(self.chains.requests)
        tau, whole = float(self.wanted(once)[0]), float(self.whole.tau(once)[0, 0])
        if not 1.0 <= tau <= whole:
            raise ConfigError(
                f"--accept-length must be in [1, {whole:.3f}], which whole drafts of this "
                f"recording reach, got {tau:g}"
            )
        mine, rivals = self.rules
        rivals = sorted(
            rivals, key=lambda rule: float(rule.curve.gamma_at(self.wanted(once), once)[0])
        )
        drawn = self._change(mine, rivals[0], resamples(self.families, NUM_RESAMPLES))
        low, high = (math.nan, math.nan) if np.isnan(drawn).any() else interval(drawn)
        return Verdict(
            tau, whole, mine.setting(tau, self.chains), rivals[0].setting(tau, self.chains),
            float(self._change(mine, rivals[0], once)[0]), low, high,
            {
                name: float(self._change(mine, rivals[0], everyone(self.families, only=name))[0])
                for name in sorted(set(self.families))
            },
            (
                rivals[1].setting(tau, self.chains),
                *(Setting.of(name, "default", "", replay(policy, self.chains))
                  for name, policy in others.items()),
            ),
            self.chains.left_out,
        )  # fmt: skip

    def _change(self, mine: Rule, rival: Rule, weights: Array) -> Array:
        """[S] of the drafts verified, in per cent; nan where the accept length is not reached."""
        tau = self.wanted(weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            return 100 * (
                mine.curve.gamma_at(tau, weights) / rival.curve.gamma_at(tau, weights) - 1
            )


def rounded_down(beta: float) -> float:
    """To two digits behind the point, or two that are not 0: 0.3568 -> 0.35, 0.01239 -> 0.012.

    Down, because a lower threshold keeps more: the accept length is reached.
    """
    digits = 2 if beta >= 0.1 else 1 - math.floor(math.log10(beta))
    return math.floor(beta * 10**digits * (1 + 1e-12)) / 10**digits


def on_tokens(scored: Scored, flags: str, why: str) -> str:
    """What is known without a replay, ``why`` there is none: a threshold, and what it keeps."""
    unknown = f"Whether this classifier pays is not known: {why}"
    accepted = scored.path_confidence[scored.accepted]
    beta = threshold_for(accepted, math.ceil(WANTED_SHARE * len(accepted)))
    if not 0 < beta <= 1:
        return f"{unknown}. No draft was accepted, so there is no threshold to choose"
    beta = rounded_down(min(beta, ODDS_GRID[-1]))
    kept = decide(scored, beta)
    change = 100 * (float(kept.classifier.sum() / kept.joint.sum()) - 1)
    return (
        f"{unknown}. Token by token {flags} --c2t-beta {beta:g} keeps {100 * WANTED_SHARE:.0f} % "
        f"of the accepted ones, and {change:+.1f} % in all beside the joint probability alone"
    )


def calibration_line(
    report: Report, recordings: Sequence[str], classifier: str, recipe: str
) -> str:
    """The calibration error beside what it is held against, and what to do about it."""
    error = report.summary.classifier.ece
    if math.isnan(error):
        return "Calibration: nothing was scored"
    told = f"calibration error (ECE, 15 bins) {error:.3f}"
    if error <= CALIBRATED:
        return f"Calibration: {told}, not above {CALIBRATED:g}"
    return (
        f"WARNING: {told} is above {CALIBRATED:g}: confidences are no probabilities. Thresholds "
        "chosen here allow for that, those from elsewhere do not. To recalibrate (a calibrated "
        "gate is asked in torch, not by its kernel), and evaluate on another recording:\n"
        f"  python -m sglang_c2t train {shlex.join(recordings)} --recipe {recipe} --fine-tune "
        f"{shlex.quote(classifier)} --calibration isotonic --out calibrated.safetensors"
    )

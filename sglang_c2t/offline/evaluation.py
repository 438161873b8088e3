"""Evaluate a classifier on recorded drafts: does it pay, and which setting to serve.

A classifier pays if the target verifies fewer drafts with it, at equal accept length, than with
the best rule that needs no classifier: a threshold on the joint probability, or one draft length.
That counts work, not time: what a verified draft costs depends on the load.

Trees, and drafts of visited roots only, are not replayed. For them a threshold is chosen token by
token. A token is kept if its confidence and those of all its ancestors reach the threshold.

Legend: n tokens, Q requests, S resamples.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sglang_c2t.classifier.checkpoint import Classifier, load_classifier
from sglang_c2t.classifier.recording import Recording, require_finite
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.offline.curves import ODDS_GRID, Array, Curve, everyone, interval, resamples, sweep
from sglang_c2t.offline.replay import Chains, Outcome, replay
from sglang_c2t.offline.scores import auc, expected_calibration_error
from sglang_c2t.policies import build_policy, policy_of
from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.tree import least_on_path

#: Default accept length, as a share of that of full drafts. Without a replay: share of the accepted
#: tokens that are kept.
WANTED_SHARE = 0.98

NUM_RESAMPLES = 1000


def evaluate(
    recording: Recording,
    classifier_name: str,
    *,
    accept_length: float | None = None,
    others: Sequence[str] = (),
) -> list[str]:
    """The lines that ``evaluate`` prints. The last one is the answer and the setting to serve.

    Args:
        recording: Drafts, and which of them the target accepted.
        classifier_name: A shipped classifier's name, or a file.
        accept_length: Tokens per verification wanted; 98 % of full drafts' by default.
        others: Policies whose replay at their defaults is printed too.

    Raises:
        ConfigError: The recording lacks a feature or holds values that are not finite, or full
            drafts do not reach the accept length.
    """
    classifier = load_classifier(classifier_name)
    scored = score(recording, classifier)
    policy = policy_of(classifier)
    flags = f"--c2t-policy {policy} --c2t-classifier {shlex.quote(classifier_name)}"
    first = quality(scored, classifier)
    if reason := _not_replayable(recording):
        return [first, token_threshold(scored, flags, reason)]
    chains = Chains.from_recording(recording)
    mine = build_policy(C2TConfig(policy, classifier=classifier_name))
    named = {name: build_policy(C2TConfig(name)) for name in others}
    found = compare(chains, mine, flags, accept_length, named)
    return [first, "", *found.lines(), "", found.sentence]


def _not_replayable(recording: Recording) -> str:
    """Why a recording cannot be replayed; empty if it can."""
    if recording.topk > 1:
        return "this recording holds trees, and only chains are replayed here"
    if recording.roots != "every":
        return (
            "this recording holds only the roots that its server visited: record with "
            "--c2t-record-roots every"
        )
    return "" if recording.num_nodes else "this recording holds no draft"


# -- token by token ------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """The tokens that a classifier is evaluated on, in the recording's order."""

    confidence: Tensor  # [n] float32
    joint: Tensor  # [n] float32
    accepted: Tensor  # [n] bool
    path_confidence: Tensor  # [n] float32, the least along the token's path
    path_joint: Tensor  # [n] float32, the least along the token's path

    @property
    def calibration_error(self) -> float:
        """Over 15 bins of equal width; nan without tokens."""
        return expected_calibration_error(self.confidence, self.accepted.float())


def score(recording: Recording, classifier: Classifier) -> Scored:
    """Score every recorded token."""
    layer = recording.layer(classifier.features.needs)
    confidence = classifier.confidence(layer)
    require_finite(torch.stack((confidence, layer.joint), dim=1))
    parents, depth = recording.parent_rows(), recording.nodes["depth"]
    max_depth = int(depth.max()) if len(depth) else 1
    # A path may lead through tokens that are not scored: compute it over all tokens first.
    columns: tuple[Tensor, ...] = (
        confidence,
        layer.joint,
        recording.nodes["accept"].bool(),
        least_on_path(confidence[None], parents[None], max_depth)[0],
        least_on_path(layer.joint[None], parents[None], max_depth)[0],
    )
    return Scored(*columns)


def quality(scored: Scored, classifier: Classifier) -> str:
    """Format ranking and calibration of the classifier, versus the joint probability's ranking."""
    labels = scored.accepted.float()
    share = f", {scored.accepted.double().mean():.0%} of them accepted" if len(labels) else ""
    return (
        f"{classifier.name} reads {', '.join(classifier.features.names)}. Over {len(labels):,} "
        f"tokens{share}: AUC {_number(auc(scored.confidence, labels))} (joint probability alone "
        f"{_number(auc(scored.joint, labels))}), calibration error "
        f"{_number(scored.calibration_error)}."
    )


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def token_threshold(scored: Scored, flags: str, reason: str) -> str:
    """The threshold that keeps 98 % of the accepted tokens, and ``reason`` for no replay."""
    unknown = f"Whether this classifier pays is not known: {reason}"
    accepted = scored.path_confidence[scored.accepted]
    beta = _threshold_for(accepted, math.ceil(WANTED_SHARE * len(accepted)))
    if not 0 < beta <= 1:
        return f"{unknown}. No draft was accepted, so there is no threshold to choose"
    beta = rounded_down(min(beta, ODDS_GRID[-1]))
    kept = scored.path_confidence >= beta
    rival = _threshold_for(scored.path_joint[scored.accepted], int((kept & scored.accepted).sum()))
    change = 100 * (float(kept.sum() / (scored.path_joint >= rival).sum()) - 1)
    return (
        f"{unknown}. Token by token {flags} --c2t-beta {beta:g} keeps {100 * WANTED_SHARE:.0f} % "
        f"of the accepted ones, and {change:+.1f} % in all versus the joint probability alone"
    )


def _threshold_for(scores: Tensor, count: int) -> float:
    """The largest threshold that at least ``count`` of ``scores`` reach; inf for none."""
    return float(scores.topk(count).values[-1]) if count else math.inf


def rounded_down(beta: float) -> float:
    """Round to two decimals, or two significant digits: 0.3568 -> 0.35, 0.01239 -> 0.012. Down,
    because a lower threshold keeps more: the accept length is still reached.
    """
    digits = 2 if beta >= 0.1 else 1 - math.floor(math.log10(beta))
    return math.floor(beta * 10**digits * (1 + 1e-12)) / 10**digits


# -- by replay -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A rule as it would be served, and the counts of its replay."""

    rule: str
    value: str  # its threshold or length in words
    flags: str
    outcome: Outcome


@dataclass(frozen=True)
class Verdict:
    """The classifier versus the best rule without one, at equal accept length."""

    wanted: float  # tau
    full: float  # tau of full drafts
    mine: Setting
    rival: Setting
    change: float  # of the drafts verified at equal tau, in per cent; below 0 is fewer
    low: float  # of its 95 % interval over requests; nan where there is none
    high: float
    others: tuple[Setting, ...]
    chains: Chains

    @property
    def pays(self) -> bool | None:
        """``None`` where the interval includes zero."""
        return True if self.high < 0 else False if self.low > 0 else None

    @property
    def sentence(self) -> str:
        """Whether the classifier pays, by how much, and what to serve."""
        verb = {True: "pays", False: "does not pay", None: "may or may not pay"}[self.pays]
        bounds = "no interval" if math.isnan(self.low) else f"{self.low:+.1f}, {self.high:+.1f}"
        best = self.mine if self.pays else self.rival
        needs_none = "" if self.pays else ", which needs no classifier"
        return (
            f"On these recordings this classifier {verb}: {self.change:+.1f} % [{bounds}] drafts "
            f"verified at equal accept length, versus {self.rival.rule}{needs_none}. For "
            f"{self.wanted:.2f} tokens per verification set {best.flags}"
        )

    def lines(self) -> list[str]:
        """The settings as a table."""
        rows = [["rule", "setting", "tau", "gamma", "drafted"]]
        for one in (self.mine, self.rival, *self.others):
            counts = one.outcome.accept_length(), one.outcome.gamma(), one.outcome.drafted_length()
            rows.append([one.rule, one.value, *(f"{count:.3f}" for count in counts)])
        rule, value, *_ = (max(map(len, column)) for column in zip(*rows, strict=True))
        left_out = self.chains.left_out
        return [
            f"{self.chains.num_requests} requests, chains of {self.chains.max_length}. For "
            f"{self.wanted:.3f} tokens per verification ({100 * self.wanted / self.full:.0f} % of "
            "what full drafts give; --accept-length sets another):",
            *(f"{a:<{rule}}  {b:<{value}}  {c:>6}  {d:>6}  {e:>7}" for a, b, c, d, e in rows),
            "tau: tokens per verification; gamma: drafts verified in each; drafted: made in each.",
            *([f"{left_out} requests lack roots and are left out."] if left_out else []),
        ]


@dataclass(frozen=True)
class Rule:
    """A rule with a threshold or a length, and its curve."""

    name: str
    build: Callable[[float], ChainPolicy]
    grid: Sequence[float]
    value: str  # in words
    flags: str
    curve: Curve
    interpolated: bool  # whether values between those of the grid may be served

    def setting(self, tau: float, chains: Chains) -> Setting:
        """The setting with the shortest drafts whose replay reaches ``tau``."""
        for value in self._candidates(tau, everyone(chains.requests)):
            outcome = replay(self.build(value), chains)
            if outcome.accept_length() >= tau:
                break
        words, flags = (text.format(f"{value:g}") for text in (self.value, self.flags))
        return Setting(self.name, words, flags, outcome)

    def _candidates(self, tau: float, weights: Array) -> Iterator[float]:
        """The threshold where the curve reaches ``tau``, then all that keep more."""
        if not self.interpolated:
            yield from self.grid
            return
        least = float(self.curve.tau(weights).min())
        found = self.curve.threshold_at(max(tau, least), self.grid, weights)
        yield rounded_down(max(found, ODDS_GRID[1]))
        yield from (rounded_down(beta) for beta in reversed(self.grid) if 0 < beta < found)


def compare(
    chains: Chains,
    mine: ChainPolicy,
    flags: str,
    accept_length: float | None = None,
    others: Mapping[str, ChainPolicy] | None = None,
) -> Verdict:
    """Compare a gate at the wanted accept length; ``flags`` serve it, but for its threshold.

    Raises:
        ConfigError: Full drafts do not reach the accept length.
    """
    full = Curve.of([replay(Fixed(), chains)])
    wanted = functools.partial(_wanted, full, accept_length)
    once = everyone(chains.requests)
    tau, most = float(wanted(once)[0]), float(full.tau(once)[0, 0])
    if not 1.0 <= tau <= most:
        raise ConfigError(
            f"--accept-length must be in [1, {most:.3f}], which full drafts of this recording "
            f"reach, got {tau:g}"
        )
    escaped = flags.replace("{", "{{").replace("}", "}}")
    ours = _threshold_rule(
        chains, "this classifier", lambda beta: replace(mine, beta=beta), escaped  # type: ignore[type-var]
    )  # fmt: skip
    best, other = sorted(
        (
            _threshold_rule(chains, "the joint probability alone", DyJoint, "--c2t-policy dyjoint"),
            _length_rule(chains),
        ),
        key=lambda rival: float(rival.curve.gamma_at(wanted(once), once)[0]),
    )
    families = [name.rpartition("/")[0] for name in chains.requests]
    weights = resamples(families, NUM_RESAMPLES)
    drawn = _change(ours, best, wanted(weights), weights)
    low, high = (math.nan, math.nan) if np.isnan(drawn).any() else interval(drawn)
    replayed = (
        Setting(name, "default", "", replay(policy, chains))
        for name, policy in (others or {}).items()
    )
    change = float(_change(ours, best, wanted(once), once)[0])
    return Verdict(
        tau, most, ours.setting(tau, chains), best.setting(tau, chains),
        change, low, high, (other.setting(tau, chains), *replayed), chains,
    )  # fmt: skip


def _wanted(full: Curve, accept_length: float | None, weights: Array) -> Array:
    """[S] accept length to compare at, of requests with ``weights`` [S, ...]; ``None``: nearly that
    of ``full`` drafts.
    """
    if accept_length is not None:
        return np.full(len(weights), accept_length)
    return WANTED_SHARE * full.tau(weights)[:, 0]


def _threshold_rule(
    chains: Chains, name: str, build: Callable[[float], ChainPolicy], flags: str
) -> Rule:
    """A rule that ends drafts by a threshold."""
    curve = sweep(build, chains)
    return Rule(name, build, ODDS_GRID, "beta {}", f"{flags} --c2t-beta {{}}", curve, True)


def _length_rule(chains: Chains) -> Rule:
    """The rule that drafts the same number of tokens for every request."""

    def with_length(length: float) -> Fixed:
        return Fixed(int(length))

    lengths = [float(length) for length in range(1, chains.max_length + 1)]
    curve = sweep(with_length, chains, lengths)
    flags = "--speculative-num-steps {}, without --c2t"
    return Rule("one length for all", with_length, lengths, "{} drafts", flags, curve, False)


def _change(ours: Rule, best: Rule, tau: Array, weights: Array) -> Array:
    """[S] change in drafts verified at accept lengths ``tau`` [S], in per cent; nan where it is not
    reached.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = ours.curve.gamma_at(tau, weights) / best.curve.gamma_at(tau, weights)
    return np.asarray(100 * (ratio - 1))

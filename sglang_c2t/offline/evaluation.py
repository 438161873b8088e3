"""How good is a classifier on recorded drafts: the paper's tables, as numbers.

Recall and positive rate (appendix C.2), acceptance by joint probability and depth
(Table 1) and entropy buckets (Table 5) of C2T (arXiv:2502.13652), and calibration. Pure
torch; draws and writes nothing.

A token is *kept* when its score and those of all tokens before it reach the threshold: a
child of a dropped token is dropped too (appendix D). The rival is the joint probability
alone, with the threshold at which it keeps as many accepted tokens as the classifier;
the paper's is EAGLE-2's 60 best tokens of each tree.

Legend: n recorded tokens. What is undefined is nan, in JSON null,
in Markdown "-".
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.recording import Recording, require_finite
from sglang_c2t.offline.scores import (
    Bin,
    Rates,
    auc,
    expected_calibration_error,
    rates,
    reliability,
)

#: Lower ends of the entropy buckets of Table 5, in nats.
ENTROPY_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


@dataclass(frozen=True)
class Scored:
    """The tokens that a classifier is judged on, in the recording's order."""

    confidence: Tensor  # [s] float32
    joint: Tensor  # [s] float32
    entropy: Tensor  # [s] float32, nats
    accepted: Tensor  # [s] bool
    path_confidence: Tensor  # [s] float32, the smallest along the token's path
    path_joint: Tensor  # [s] float32, the smallest along the token's path


class Kept(NamedTuple):
    """Which tokens either method would have verified."""

    classifier: Tensor  # [s] bool
    joint: Tensor  # [s] bool
    beta: float
    joint_threshold: float  # inf when the classifier keeps no accepted token


@dataclass(frozen=True)
class Method:
    """One score of a token, over all scored tokens."""

    threshold: float
    auc: float
    ece: float  # 15 equal-width bins
    rates: Rates


@dataclass(frozen=True)
class Summary:
    """The classifier and its rival in one line each."""

    drafts: int
    recorded_tokens: int
    tokens: int  # scored
    accept_rate: float  # of the scored tokens
    classifier: Method
    joint: Method


@dataclass(frozen=True)
class EntropyBucket:
    """Tokens whose distribution had an entropy in [low, high) nats; a row of Table 5."""

    low: float
    high: float
    tokens: int
    proportion: float
    classifier: Rates
    joint: Rates


@dataclass(frozen=True)
class AcceptanceTable:
    """Table 1: acceptance by joint probability (rows) and depth (columns).

    Row i is the interval (edges[i], edges[i + 1]]; the first one holds 0 too.
    """

    edges: list[float]
    depths: list[int]
    tokens: list[list[int]]
    accept_rate: list[list[float]]  # nan without tokens


@dataclass(frozen=True)
class Report:
    """All that :func:`evaluate` found out."""

    features: list[str]
    beta: float
    roots: str
    origins: list[dict[str, Any]]
    summary: Summary
    entropy_buckets: list[EntropyBucket]
    """The last one is the total."""

    acceptance: AcceptanceTable
    reliability: dict[str, list[Bin]]
    """Of ``classifier`` and ``joint``."""

    def to_json(self, **more: Any) -> str:
        """One line of strict JSON, with ``more`` beside: numbers that are not finite are null."""
        return json.dumps(_plain(asdict(self) | more), allow_nan=False)

    def to_markdown(self, verdict: str = "") -> str:
        """The same as tables, behind a ``verdict``."""
        parts = [
            "# Classifier evaluation",
            *([verdict] if verdict else []),
            _intro(self),
            _summary_text(self),
            _bucket_text(self),
            _acceptance_text(self),
            _reliability_text(self),
        ]
        return "\n\n".join(parts) + "\n"


def evaluate(recording: Recording, classifier: Classifier, beta: float = 0.5) -> Report:
    """Judge a classifier that keeps tokens of confidence >= ``beta``.

    Raises:
        ConfigError: The recording lacks a feature, or holds values that are not finite.
    """
    scored = score(recording, classifier)
    kept = decide(scored, beta)
    labels = scored.accepted.float()
    return Report(
        features=list(classifier.features.names),
        beta=beta,
        roots=recording.roots,
        origins=recording.origins,
        summary=summary(recording, scored, kept),
        entropy_buckets=entropy_buckets(scored, kept),
        acceptance=acceptance_table(recording),
        reliability={
            "classifier": reliability(scored.confidence, labels),
            "joint": reliability(scored.joint, labels),
        },
    )


def score(recording: Recording, classifier: Classifier) -> Scored:
    """Ask the classifier about every recorded token it can be judged on."""
    layer = recording.layer(classifier.features.needs)
    confidence = classifier.confidence(layer)
    require_finite(torch.stack((confidence, layer.joint, layer.entropy), dim=1))
    parents, depth = recording.parent_rows(), recording.nodes["depth"]
    # A path may lead through tokens that are not scored themselves, so it is walked first.
    columns: tuple[Tensor, ...] = (
        confidence,
        layer.joint,
        layer.entropy,
        recording.nodes["accept"].bool(),
        least_on_path(confidence, parents, depth),
        least_on_path(layer.joint, parents, depth),
    )
    return Scored(*columns)


def decide(scored: Scored, beta: float) -> Kept:
    """What the classifier keeps at ``beta``, and what its rival keeps for the same recall."""
    by_classifier = scored.path_confidence >= beta
    num_recalled = int((by_classifier & scored.accepted).sum())
    threshold = threshold_for(scored.path_joint[scored.accepted], num_recalled)
    return Kept(by_classifier, scored.path_joint >= threshold, beta, threshold)


def least_on_path(values: Tensor, parents: Tensor, depth: Tensor) -> Tensor:
    """[n]: the smallest value among a token and all before it.

    A token and all before it reach a threshold exactly when this does. ``values`` [n];
    ``parents`` [n] int64 rows, -1 for none; ``depth`` [n], larger than the parent's.

    Chain with values 0.9, 0.2, 0.7 -> 0.9, 0.2, 0.2.
    """
    least = values.clone()
    for level in depth.unique():  # ascending, so that parents are done before children
        rows = ((depth == level) & (parents >= 0)).nonzero().flatten()
        least[rows] = torch.minimum(least[rows], least[parents[rows]])
    return least


def threshold_for(scores: Tensor, count: int) -> float:
    """The largest threshold that at least ``count`` of ``scores`` reach; inf for none."""
    return float(scores.topk(count).values[-1]) if count else math.inf


def summary(recording: Recording, scored: Scored, kept: Kept) -> Summary:
    """Counts, ranking, calibration and rates over all scored tokens."""
    labels = scored.accepted.float()

    def method(scores: Tensor, mask: Tensor, threshold: float) -> Method:
        ece = expected_calibration_error(scores, labels)
        return Method(threshold, auc(scores, labels), ece, rates(mask, scored.accepted))

    return Summary(
        drafts=recording.num_drafts,
        recorded_tokens=recording.num_nodes,
        tokens=labels.numel(),
        accept_rate=float(labels.mean()),
        classifier=method(scored.confidence, kept.classifier, kept.beta),
        joint=method(scored.joint, kept.joint, kept.joint_threshold),
    )


def entropy_buckets(scored: Scored, kept: Kept) -> list[EntropyBucket]:
    """Table 5, the total last; the total equals the summary's rates."""
    ends = (*ENTROPY_BUCKETS[1:], math.inf)
    # Buckets by index, so that an entropy rounded to just below zero is not lost.
    index = torch.bucketize(scored.entropy, torch.tensor(ENTROPY_BUCKETS[1:]), right=True)
    masks = [index == i for i in range(len(ENTROPY_BUCKETS))]
    buckets = [
        _bucket(low, high, scored, kept, mask)
        for low, high, mask in zip(ENTROPY_BUCKETS, ends, masks, strict=True)
    ]
    return [*buckets, _bucket(0.0, math.inf, scored, kept, torch.ones_like(scored.accepted))]


def _bucket(low: float, high: float, scored: Scored, kept: Kept, mask: Tensor) -> EntropyBucket:
    accepted = scored.accepted[mask]
    return EntropyBucket(
        low=low,
        high=high,
        tokens=accepted.numel(),
        proportion=float(mask.double().mean()),
        classifier=rates(kept.classifier[mask], accepted),
        joint=rates(kept.joint[mask], accepted),
    )


def acceptance_table(recording: Recording, num_intervals: int = 20) -> AcceptanceTable:
    """Table 1 over all recorded tokens, whatever the classifier is scored on.

    A token behind a rejected one counts as rejected, as in the paper.
    """
    edges = [i / num_intervals for i in range(num_intervals + 1)]
    row = torch.bucketize(recording.nodes["joint"], torch.tensor(edges[1:-1]))
    depths, column = recording.nodes["depth"].unique(return_inverse=True)
    shape = (num_intervals, depths.numel())
    cell = row * depths.numel() + column
    size = shape[0] * shape[1]
    tokens = cell.bincount(minlength=size).reshape(shape)
    accepted = cell.bincount(recording.nodes["accept"].double(), minlength=size).reshape(shape)
    return AcceptanceTable(
        edges=edges,
        depths=depths.tolist(),
        tokens=tokens.tolist(),
        accept_rate=(accepted / tokens).tolist(),
    )


# -- text ---------------------------------------------------------------------------------


def _intro(report: Report) -> str:
    drafted = "; ".join(
        f"{o.get('algorithm', '?')} draft `{o.get('draft', '?')}` for target "
        f"`{o.get('target', '?')}`"
        for o in report.origins
    )
    return (
        f"Classifier: reads {', '.join(report.features)}; keeps a token "
        f"whose confidence and those of all tokens before it are >= beta = {report.beta:g}.\n"
        f"Recording: {report.summary.recorded_tokens} tokens in {report.summary.drafts} drafts "
        f"of roots `{report.roots}`; {drafted or 'origin unknown'}."
    )


def _summary_text(report: Report) -> str:
    found = report.summary
    rows = [
        [
            name,
            f"{method.threshold:.3g}" if math.isfinite(method.threshold) else "-",
            _number(method.auc),
            _number(method.ece),
            *_rate_cells(method.rates),
            _number(method.rates.positive_rate),
        ]
        for name, method in _both(found)
    ]
    return (
        "## Summary\n\n"
        f"Ranking, calibration (15 bins) and decisions over n = {found.tokens} tokens, "
        f"{_number(found.accept_rate)} of them accepted; the joint probability has the threshold "
        "at which it keeps as many accepted tokens; theta is the kept share.\n\n"
        + _table(
            ["Method", "Threshold", "AUC", "ECE", "Accuracy", "Precision", "Recall", "F1", "theta"],
            rows,
        )
    )


def _bucket_text(report: Report) -> str:
    ranges = [f"[{b.low:g}, {b.high:g})" for b in report.entropy_buckets[:-1]]
    rows = [
        [name, method, str(bucket.tokens), _number(bucket.proportion), *_rate_cells(found)]
        for name, bucket in zip([*ranges, "Total"], report.entropy_buckets, strict=True)
        for method, found in _both(bucket)
    ]
    return (
        "## Entropy buckets\n\n"
        f"Decisions by the draft's entropy in nats, over n = {report.summary.tokens} "
        f"tokens; thresholds as in the summary (C2T, Table 5).\n\n"
        + _table(
            ["Entropy", "Method", "n", "Proportion", "Accuracy", "Precision", "Recall", "F1"],
            rows,
            text_columns=2,
        )
    )


def _acceptance_text(report: Report) -> str:
    table = report.acceptance
    rows = [
        [f"({low:g}, {high:g}]"]
        + [f"{_number(r, 3)} ({n})" if n else "-" for r, n in zip(rate, tokens, strict=True)]
        for low, high, rate, tokens in zip(
            table.edges[:-1], table.edges[1:], table.accept_rate, table.tokens, strict=True
        )
    ]
    return (
        "## Acceptance by joint probability and depth\n\n"
        f"Accepted share of all n = {report.summary.recorded_tokens} recorded tokens, with the "
        "number of tokens in brackets (C2T, Table 1).\n\n"
        + _table(["Joint probability", *(f"d={d}" for d in table.depths)], rows)
    )


def _reliability_text(report: Report) -> str:
    pairs = zip(report.reliability["classifier"], report.reliability["joint"], strict=True)
    rows = [
        [f"[{a.low:.3f}, {a.high:.3f}{')' if a.high < 1 else ']'}", *_bin_cells(a), *_bin_cells(b)]
        for a, b in pairs
    ]
    return (
        "## Reliability\n\n"
        f"Mean score and accepted share of n = {report.summary.tokens} tokens, binned "
        "by the classifier's confidence (left) and by the joint probability (right).\n\n"
        + _table(["Bin", "Confidence", "Accepted", "n", "Joint probability", "Accepted", "n"], rows)
    )


def _both(found: Summary | EntropyBucket) -> list[tuple[str, Any]]:
    return [("joint probability", found.joint), ("classifier", found.classifier)]


def _rate_cells(found: Rates) -> list[str]:
    return [_number(x) for x in (found.accuracy, found.precision, found.recall, found.f1)]


def _bin_cells(found: Bin) -> list[str]:
    return [_number(found.mean_score), _number(found.accept_rate), str(found.tokens)]


def _number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _table(header: list[str], rows: list[list[str]], text_columns: int = 1) -> str:
    """GitHub Markdown, columns padded to one width; behind the text, numbers to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Prometheus series of C2T, counted where SGLang counts a request's metrics.

Each verification attaches a :class:`Step` to its result. When the scheduler gets the result, this
file counts each request that SGLang counts, from the same numbers. So the series equal the sums
over finished requests' ``meta_info``. SGLang's ``/metrics`` collects the series of all processes.
"""

from __future__ import annotations

import functools
from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_c2t.config import active
from sglang_c2t.plan.step import DRAFT_FREE, StepKind, StepPlan
from sglang_c2t.srt import attach

#: Kinds of steps with a label in the planner's counts.
COUNTED = (
    StepKind.PLANNED,
    StepKind.UNIFORM,
    StepKind.UNMEASURED,
    StepKind.EXPLORE,
    StepKind.FALLBACK,
)


@dataclass(frozen=True)
class Step:
    """Facts of a verification beyond its result, in whose ``c2t_step`` it is."""

    full: int
    """Most rows of a request, root included: N."""

    drafted: int
    """Rows of a request's full draft; less than ``full`` if the batch drafted fewer layers."""

    forwarded_rows: int
    """Rows of the target's forward, padding included."""

    plan: StepPlan

    max_rows: int | None = None
    """``--c2t-max-verify-rows``."""

    predicted_ms: float = 0.0
    """Sum over all steps so far with a prediction, as the next one."""

    measured_ms: float = 0.0

    gate_fell_back: bool = False
    """Whether the policy failed, so that its gate cut nothing."""

    @property
    def planned(self) -> bool:
        """Whether a planner planned the step, or failed to."""
        return self.plan.kind in COUNTED

    @property
    def fell_back(self) -> bool:
        """Whether the policy or its planner failed, so that full drafts are verified."""
        return self.gate_fell_back or self.plan.kind is StepKind.FALLBACK

    def reason(self, rows: int, batch_rows: int) -> str:
        """Return why a request's draft of ``rows`` rows ended, in a batch of ``batch_rows``.
        ``full``: the draft has all rows. ``depth``: the batch drafted no deeper. ``budget``: the
        batch used up its rows, as with any plan. ``policy``: all other reasons.
        """
        if rows >= self.full:
            return "full"
        if rows >= self.drafted:
            return "depth"
        spent = self.max_rows is not None and batch_rows >= self.max_rows
        if spent or self.planned:
            return "budget"
        return "policy"


class Series:
    """The series of one scheduler process.

    Args:
        labels: Labels of SGLang's own series.
        full: N; draft lengths have a bucket each up to 16, then powers of two.
    """

    def __init__(self, labels: dict[str, str], full: int) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR, which the import reads, after plugins load.
        from prometheus_client import Counter, Histogram

        names = tuple(labels)

        def counter(name: str, documentation: str) -> Any:
            return Counter(f"c2t:{name}", documentation, names).labels(**labels)

        self.steps = counter("steps", "Verification forwards of the target.")
        self.verifications = counter("verifications", "Verifications, one per request and step.")
        self.proposed = counter("proposed_drafts", "Draft tokens verified, roots not included.")
        self.correct = counter("correct_drafts", "Draft tokens accepted.")
        self.rows = counter("verify_rows", "Rows the target was asked to verify, with roots.")
        self.padding = counter("verify_padding_rows", "Rows forwarded beyond those asked for.")
        self.policy_failures = counter(
            "policy_failures", "Steps with full drafts because the policy failed."
        )
        stops = Counter(
            "c2t:draft_stops", "Drafts by the reason for their end.", (*names, "reason")
        )
        self.stops = {
            reason: stops.labels(**labels, reason=reason)
            for reason in ("policy", "full", "depth", "budget")
        }
        self.proposed_length = Histogram(
            "c2t:proposed_length",
            "Draft tokens verified per verification.",
            names,
            buckets=_buckets(full - 1),
        ).labels(**labels)
        self.correct_length = Histogram(
            "c2t:correct_length",
            "Draft tokens accepted per verification.",
            names,
            buckets=_buckets(full - 1),
        ).labels(**labels)
        plans = Counter("c2t:plans", "Steps that a planner planned, by reason.", (*names, "reason"))
        reasons = [*(kind.value for kind in COUNTED), DRAFT_FREE]
        self.plans = {reason: plans.labels(**labels, reason=reason) for reason in reasons}
        self.planned_layers = counter("planned_layers", "Draft layers of planned steps.")
        self.predicted = counter("predicted_step_seconds", "Predicted time of planned steps.")
        self.measured = counter("measured_step_seconds", "Measured time of those steps.")
        self._counted_ms = 0.0, 0.0  # predicted and measured

    def _add_plan(self, step: Step) -> None:
        self.plans[step.plan.reason].inc()
        self.planned_layers.inc(step.plan.num_layers)
        now = step.predicted_ms, step.measured_ms
        both = zip((self.predicted, self.measured), now, self._counted_ms, strict=True)
        for series, ms, before in both:
            series.inc(max(ms - before, 0.0) / 1e3)
        self._counted_ms = now

    def add(self, step: Step, batch_rows: int, counted: list[tuple[int, int]]) -> None:
        """Count a step: (rows, accepted drafts) of each request that SGLang counts."""
        self.steps.inc()
        self.rows.inc(batch_rows)
        self.padding.inc(step.forwarded_rows - batch_rows)
        self.policy_failures.inc(step.fell_back)
        if step.planned:
            self._add_plan(step)
        self.verifications.inc(len(counted))
        self.proposed.inc(sum(rows - 1 for rows, _ in counted))
        self.correct.inc(sum(num_correct for _, num_correct in counted))
        for reason, many in Counts(step.reason(rows, batch_rows) for rows, _ in counted).items():
            self.stops[reason].inc(many)
        for rows, num_correct in counted:
            self.proposed_length.observe(rows - 1)
            self.correct_length.observe(num_correct)


def _buckets(most: int) -> list[int]:
    """Return 0, 1, ... 16, 32, 64, ... up to ``most``."""
    doubling = (1 << n for n in range(5, max(most, 1).bit_length()))
    return sorted({*range(min(most, 16) + 1), *doubling, most})


@functools.cache
def _series(labels: tuple[tuple[str, str], ...], full: int) -> Series:
    return Series(dict(labels), full)


def count_step(
    original: Callable[..., Any], processor: Any, result: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook on ``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``. SGLang skips
    requests that ended or were retracted meanwhile, so its counts before and after select the
    requests.
    """
    step: Step | None = getattr(result, "c2t_step", None)
    reporter = processor.metrics_reporter
    if step is None or not reporter.current_scheduler_metrics_enabled:
        return original(processor, result, batch, *args, **kwargs)
    before = [_counts(req) for req in batch.reqs]
    resolved = original(processor, result, batch, *args, **kwargs)
    series = _series(tuple(reporter.metrics_collector.labels.items()), step.full)
    counted = []
    for req, (verify_ct, num_rows, num_correct) in zip(batch.reqs, before, strict=True):
        now = _counts(req)
        if now[0] > verify_ct:
            counted.append((now[1] - num_rows, now[2] - num_correct))
    series.add(step, result.num_cap_tokens, counted)
    return resolved


def _counts(req: Any) -> tuple[int, int, int]:
    return req.spec_verify_ct, req.spec_num_cap_tokens, req.spec_num_correct_drafts


def correct_gauge(_collector: Any, stats: Any) -> None:
    """BEFORE hook on ``SchedulerMetricsCollector.log_stats``: sglang:spec_accept_rate. SGLang
    divides accepted drafts by full ones. Both mean lengths count one row or token per verification
    that is no draft.
    """
    if active() is not None and stats.spec_cap_length > 1:
        rate = (stats.spec_accept_length - 1) / (stats.spec_cap_length - 1)
        attach.write(stats, spec_accept_rate=rate)

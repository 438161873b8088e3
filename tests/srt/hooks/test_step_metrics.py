"""Why drafts end, and in which buckets their lengths are counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.step import StepKind, StepPlan
from sglang_c2t.srt.hooks import step_metrics
from sglang_c2t.srt.hooks.step_metrics import Step, _buckets, correct_gauge, count_step
from tests.doubles import double


def plan(kind: StepKind) -> StepPlan:
    return StepPlan(kind, 5, 1, 12)


FIXED = plan(StepKind.FIXED)


@pytest.mark.parametrize(
    ("rows", "drafted", "max_rows", "reason"),
    [
        (6, 6, None, "full"),
        (6, 6, 12, "full"),
        (5, 6, None, "policy"),
        (1, 6, None, "policy"),
        (3, 3, None, "depth"),
        (2, 3, None, "policy"),
        (5, 6, 12, "budget"),
        (5, 6, 13, "policy"),
    ],
)
def test_step_metrics_reason_of_a_draft_end(
    rows: int, drafted: int, max_rows: int | None, reason: str
) -> None:
    """A batch has 12 rows to verify."""
    step = Step(full=6, drafted=drafted, forwarded_rows=16, plan=FIXED, max_rows=max_rows)
    assert step.reason(rows, 12) == reason
    planned = replace(step, plan=plan(StepKind.PLANNED))
    assert planned.reason(rows, 12) == ("budget" if reason == "policy" else reason)


@given(st.integers(0, 300))
def test_step_metrics_buckets_hold_every_length(most: int) -> None:
    buckets = _buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[: min(most, 16) + 1] == list(range(min(most, 16) + 1))
    assert buckets[-1] == most
    assert all(wide <= 2 * narrow for narrow, wide in itertools.pairwise(buckets[1:]))


def request(ended: bool) -> Any:
    return double(
        "Req",
        spec_verify_ct=7,
        spec_num_cap_tokens=20,
        spec_num_correct_drafts=9,
        finished_reason="ended" if ended else None,
    )


def sglang_counts(_processor: Any, result: Any, batch: Any) -> str:
    """SGLang's function, as far as books go: requests that ended are left out."""
    for req, rows, tokens in zip(batch.reqs, result.cap_lens, result.accept_lens, strict=True):
        if req.finished_reason is None:
            req.spec_verify_ct += 1
            req.spec_num_cap_tokens += rows
            req.spec_num_correct_drafts += tokens - 1
    result.num_cap_tokens = sum(result.cap_lens)
    return "resolved"


def sample(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, labels)


def test_step_metrics_count_what_sglang_counts() -> None:
    """A request that ended meanwhile was verified, yet is not in anybody's books."""
    components = "sglang.srt.managers.scheduler_components"
    reporter = double(
        f"{components}.metrics_reporter.SchedulerMetricsReporter",
        current_scheduler_metrics_enabled=True,
        metrics_collector=double(
            "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
            labels={"model_name": "demo"},
        ),
    )
    processor = double(
        f"{components}.batch_result_processor.SchedulerBatchResultProcessor",
        metrics_reporter=reporter,
    )
    batch = double("ScheduleBatch", reqs=[request(False), request(True), request(False)])
    result = double("GenerationBatchResult", cap_lens=[6, 4, 1], accept_lens=[4, 3, 1])
    assert count_step(sglang_counts, processor, result, batch) == "resolved"
    assert sample("c2t:steps_total", model_name="demo") is None  # not one of our verifications
    for fell_back in (False, True):
        result.c2t_step = Step(
            full=6, drafted=6, forwarded_rows=16, plan=FIXED, gate_fell_back=fell_back
        )
        assert count_step(sglang_counts, processor, result, batch) == "resolved"
    expected = {
        "steps": 2,
        "policy_failures": 1,
        "verifications": 4,
        "proposed_drafts": 10,
        "correct_drafts": 6,
        "verify_rows": 22,
        "verify_padding_rows": 10,
    }
    for name, value in expected.items():
        assert sample(f"c2t:{name}_total", model_name="demo") == value
    assert sample("c2t:draft_stops_total", model_name="demo", reason="full") == 2
    assert sample("c2t:draft_stops_total", model_name="demo", reason="policy") == 2
    assert sample("c2t:draft_stops_total", model_name="demo", reason="depth") == 0
    assert sample("c2t:proposed_length_bucket", model_name="demo", le="0.0") == 2
    assert sample("c2t:proposed_length_sum", model_name="demo") == 10
    told = sample("c2t:correct_drafts_total", model_name="demo")
    assert sample("c2t:correct_length_sum", model_name="demo") == told
    counted = sample("c2t:verifications_total", model_name="demo")
    assert sample("c2t:correct_length_count", model_name="demo") == counted
    assert sample("c2t:planned_layers_total", model_name="demo") == 0
    kinds = {StepKind.PLANNED: "plan", StepKind.UNIFORM: "uniform", StepKind.FALLBACK: "failed"}
    for number, kind in enumerate(kinds, start=1):
        result.c2t_step = Step(
            full=6, drafted=6, forwarded_rows=16, plan=plan(kind),
            predicted_ms=10.0 * number, measured_ms=20.0 * number,
        )  # fmt: skip
        count_step(sglang_counts, processor, result, batch)
    for label in kinds.values():
        assert sample("c2t:plans_total", model_name="demo", reason=label) == 1
    assert sample("c2t:planned_layers_total", model_name="demo") == 15
    assert sample("c2t:predicted_step_seconds_total", model_name="demo") == pytest.approx(0.03)
    assert sample("c2t:measured_step_seconds_total", model_name="demo") == pytest.approx(0.06)
    assert sample("c2t:policy_failures_total", model_name="demo") == 2, "the planner's, too"
    processor.metrics_reporter.current_scheduler_metrics_enabled = False
    count_step(sglang_counts, processor, result, batch)
    assert sample("c2t:steps_total", model_name="demo") == 5


@pytest.mark.parametrize(
    ("c2t", "cap", "rate"), [(True, 4.0, 0.5), (True, 1.0, 0.3), (False, 4.0, 0.3)]
)
def test_step_metrics_accept_rate_divides_by_real_drafts(
    c2t: bool, cap: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_metrics, "active", lambda: object() if c2t else None)
    stats = double(
        "sglang.srt.observability.metrics_collector.SchedulerStats",
        spec_accept_length=2.5,
        spec_cap_length=cap,
        spec_accept_rate=0.3,
    )
    correct_gauge(None, stats)
    assert stats.spec_accept_rate == rate

"""``python -m sglang_c2t advise``: watch a server for a while, then say what to set and why.

:mod:`~sglang_c2t.offline.observe` reads, :mod:`~sglang_c2t.offline.advice` judges, this puts both
together and into words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from sglang_c2t.config import ConfigError
from sglang_c2t.offline.advice import (
    BUSY,
    Cost,
    Facts,
    Finding,
    Fine,
    Outlook,
    grades_of,
    judged,
)
from sglang_c2t.offline.observe import Sample, Server, Window

#: Seconds between two looks at what runs and waits.
LOOK_EVERY = 1.0


def watched(server: Server, seconds: float, look: Callable[[], None] = lambda: None) -> Facts:
    """Watch a server for so many ``seconds``; ``look`` is called at each look.

    Raises :class:`ConfigError` where it tells too little, restarts meanwhile, or decodes nothing.
    """
    told, info = server.told(), server.info()
    samples = [server.sample()]
    while (left := samples[0].at + seconds - time.monotonic()) > 0:
        time.sleep(min(LOOK_EVERY, left))
        samples.append(server.sample())
        look()
    window = Window(samples[0], samples[-1])
    if window.restarted:
        raise ConfigError(f"the server at {server.url} restarted while it was watched: ask again")
    if window["c2t:steps_total"] == 0:
        raise ConfigError(
            f"the server at {server.url} decoded nothing in {window.seconds:.0f} s, and there is "
            "nothing to judge: ask again under the load it is meant for, or with more --seconds"
        )
    return facts_of(server.told() | {"policy": told["policy"]}, info, window, samples)


def facts_of(
    told: Mapping[str, Any], info: Mapping[str, Any], window: Window, samples: Sequence[Sample]
) -> Facts:
    """Numbers of ``GET /c2t``, ``/server_info``, and of ``/metrics`` over a while."""
    serving = told["serving"]
    one, planners = serving[0], told.get("planner") or []
    steps, plans = window["c2t:steps_total"], bool(one["plans"])
    first_drafts = [each["first_drafts"] for each in serving if each["first_drafts"]]
    of_planner = planners[0] if planners and planners[0] else {}
    return Facts(
        seconds=window.seconds,
        policy=told["policy"],
        plans=plans,
        packed=one["packed"],
        unpacked_because=one["unpacked_because"],
        num_steps=one["num_steps"],
        topk=one["topk"],
        num_draft_tokens=one["num_draft_tokens"],
        max_running=sum(each["max_running_requests"] for each in serving),
        requested_running=info.get("max_running_requests"),
        attention=info.get("attention_backend") or "this one",
        replicas=len(serving),
        running=window["c2t:verifications_total"] / steps * len(serving),
        queued=fmean(sample["sglang:num_queue_reqs"] for sample in samples),
        steps=steps,
        verifications=window["c2t:verifications_total"],
        proposed=window["c2t:proposed_drafts_total"],
        correct=window["c2t:correct_drafts_total"],
        padding=window["c2t:verify_padding_rows_total"],
        accepted_at_least=window.at_least("c2t:correct_length"),
        verified_at_least=window.at_least("c2t:proposed_length"),
        row_ms=tuple(one["row_ms"]) if one["row_ms"] else None,
        policy_stops=window["c2t:draft_stops_total{policy}"],
        gate_seconds=window["c2t:gate_seconds_total"],
        failures=window["c2t:policy_failures_total"],
        planned=sum(window[f"c2t:plans_total{{{why}}}"] for why in PLANS),
        unplanned=window["c2t:plans_total{unknown}"],
        planned_layers=window["c2t:planned_layers_total"],
        predicted_seconds=window["c2t:predicted_step_seconds_total"],
        measured_seconds=window["c2t:measured_step_seconds_total"],
        quartiles=of_planner.get("predicted_over_measured_quartiles") or (),
        median=of_planner.get("predicted_over_measured"),
        outlook=[
            Outlook(**{name: plan[name] for name in Outlook._fields})
            for plan in of_planner.get("best_plan_by_batch_size") or ()
        ],
        grades=grades_of([each["confidence"] for each in planners] if plans else first_drafts),
        classifier=one["classifier"],
        kv_used=max(sample.fullest for sample in samples),
        retracted=window["sglang:num_retracted_requests_total"],
    )


#: Why steps were planned as they were.
PLANS = ("plan", "uniform", "unknown", "explore", "failed")


def advice_text(facts: Facts, *, doctor: bool = False) -> str:
    """What was found, what to set, and for a ``doctor``, or where it is nothing, what is fine."""
    found, fine = judged(facts)
    parts = [_headline(facts)]
    if found:
        parts.append("What costs, the most costly first:\n" + _causes(found, facts))
        parts.append(_settings(found, facts))
    else:
        parts.append("Nothing to change.")
    if doctor or not found:
        parts.append("What was looked at and costs nothing that matters:\n" + _fine(fine))
    return "\n\n".join(parts)


def _headline(f: Facts) -> str:
    ranks = f" on {f.replicas} replicas" if f.replicas > 1 else ""
    rejected = f.rejected / f.rows if f.rows else 0.0
    load = "" if f.busy else f" (rows cost little at fewer than {BUSY} at once)"
    return (
        f"In {f.seconds:.0f} s{ranks}: {f.tokens:,.0f} tokens/s at {f.running:.1f} requests at "
        f"once{load}, {f.queued:.1f} waiting.\n"
        f"A verification gives {f.accept_length:.2f} tokens of {f.proposed / f.verifications:.2f} "
        f"drafts; of {f.rows / f.steps:.0f} rows a step {rejected:.0%} are rejected "
        f"drafts and {f.padding / f.rows:.0%} padding."
    )


def _causes(found: Sequence[Finding], f: Facts) -> str:
    lines = []
    for number, one in enumerate(found, start=1):
        lines.append(f"{number}. {one.name}: {one.sentence}.")
        lines.append(f"   do: {one.do}")
        lines.append(f"   expected: {_expected(one.cost, f)}")
    return "\n".join(lines)


def _expected(cost: Cost | None, f: Facts) -> str:
    if cost is None:
        return "no number can be given, for the reason above"
    low, high = (100.0 * bound / f.tokens for bound in cost[:2])
    return (
        f"{cost.low:+,.0f} to {cost.high:+,.0f} tokens/s ({low:+.0f} to {high:+.0f} %): "
        f"{cost.known_by}"
    )


def _settings(found: Sequence[Finding], f: Facts) -> str:
    """What is set now, and what to set: of two findings that set one, the more costly wins."""
    now = {
        "--c2t-policy": f.policy,
        "--speculative-num-steps": f"{f.num_steps}",
        "--speculative-eagle-topk": f"{f.topk}",
        "--speculative-num-draft-tokens": f"{f.num_draft_tokens}",
        "--max-running-requests": f"{f.max_running // f.replicas}",
    }
    wanted: dict[str, tuple[str, str]] = {}
    for one in found:
        for flag, value in one.settings.items():
            wanted.setdefault(flag, (value, one.name))
    lines = ["What to set:"]
    for flag in [*now, *(flag for flag in wanted if flag not in now)]:
        value, why = wanted.get(flag, ("", ""))
        change = f" -> {value} ({why})" if value else " (stays)"
        lines.append(f"  {flag} {now.get(flag, '')}".rstrip() + change)
    return "\n".join(lines)


def _fine(fine: Sequence[Fine]) -> str:
    return "\n".join(f"  {one.name}: {one.sentence}." for one in fine)

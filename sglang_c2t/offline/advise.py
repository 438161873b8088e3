"""``python -m sglang_c2t advise``: watch a server, then print what to set and why.
:mod:`~sglang_c2t.offline.observe` reads the server and :mod:`~sglang_c2t.offline.advice` holds the
rules. This module gathers the facts and writes the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from sglang_c2t.config import ConfigError
from sglang_c2t.offline.advice import BUSY, Facts, Finding, judge
from sglang_c2t.offline.observe import Sample, Server, Window
from sglang_c2t.plan.grades import summary

#: Seconds between two samples.
SAMPLE_EVERY = 1.0


def watch(server: Server, seconds: float, on_sample: Callable[[], None] = lambda: None) -> Facts:
    """Watch a server for so many ``seconds``; ``on_sample`` is called after each sample. Raises
    :class:`ConfigError` if it reports too little, restarts meanwhile, or decodes nothing.
    """
    told, info = server.told(), server.info()
    samples = [server.sample()]
    while (left := samples[0].at + seconds - time.monotonic()) > 0:
        time.sleep(min(SAMPLE_EVERY, left))
        samples.append(server.sample())
        on_sample()
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
    """Gather the facts from ``GET /c2t``, ``/server_info`` and samples of ``/metrics``."""
    serving, planners = told["serving"], [one for one in told.get("planner") or [] if one]
    one, steps, plans = serving[0], window["c2t:steps_total"], bool(serving[0]["plans"])
    rates: dict[int, float] = {}
    for plan in planners[0].get("best_plan_by_batch_size") or () if planners else ():
        rate = plan["tokens"] / plan["milliseconds"]
        rates[plan["requests"]] = max(rates.get(plan["requests"], 0.0), rate)
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
        row_ms=tuple(one["row_ms"]) if one.get("row_ms") else None,
        policy_stops=window["c2t:draft_stops_total{policy}"],
        failures=window["c2t:policy_failures_total"],
        planned=sum(window.by_label("c2t:plans_total").values()),
        planned_layers=window["c2t:planned_layers_total"],
        rates=rates,
        grades=summary([each["confidence"] for each in planners]),
        classifier=one["classifier"],
        kv_used=max(sample.fullest for sample in samples),
        retracted=window["sglang:num_retracted_requests_total"],
    )


def advice_text(facts: Facts, *, doctor: bool = False) -> str:
    """The load, the causes, and what to set; ``doctor`` adds the causes that were ruled out."""
    found, fine = judge(facts)
    parts = [_headline(facts)]
    if found:
        causes = [line for n, one in enumerate(found, 1) for line in _cause(n, one, facts.tokens)]
        parts.append("\n".join(["What costs, the most costly first:", *causes]))
        parts.append("\n".join(["What to set:", *_settings(found, facts)]))
    else:
        parts.append("Nothing to change.")
    if doctor or not found:
        lines = (f"  {one.name}: {one.sentence}." for one in fine)
        parts.append("\n".join(["What was ruled out:", *lines]))
    return "\n\n".join(parts)


def _headline(f: Facts) -> str:
    replicas = f" on {f.replicas} replicas" if f.replicas > 1 else ""
    load = "" if f.busy else f" (rows cost little at fewer than {BUSY} at once)"
    return (
        f"In {f.seconds:.0f} s{replicas}: {f.tokens:,.0f} tokens/s at {f.running:.1f} requests at "
        f"once{load}, {f.queued:.1f} waiting.\n"
        f"A verification gives {f.accept_length:.2f} tokens of {f.proposed / f.verifications:.2f} "
        f"drafts; of {f.rows / f.steps:.0f} rows a step {f.rejected / f.rows:.0%} are rejected "
        f"drafts and {f.padding / f.rows:.0%} padding."
    )


def _cause(number: int, one: Finding, tokens: float) -> list[str]:
    low, high, known_by = one.gain
    shares = f"{100 * low / tokens:+.0f} to {100 * high / tokens:+.0f} %"
    return [
        f"{number}. {one.name}: {one.sentence}.",
        f"   do: {one.do}",
        f"   expected: {low:+,.0f} to {high:+,.0f} tokens/s ({shares}): {known_by}",
    ]


def _settings(found: Sequence[Finding], f: Facts) -> list[str]:
    """Each flag, now and then. No two findings set the same flag."""
    now = {
        "--c2t-policy": f.policy,
        "--speculative-num-steps": f"{f.num_steps}",
        "--speculative-eagle-topk": f"{f.topk}",
        "--speculative-num-draft-tokens": f"{f.num_draft_tokens}",
        "--max-running-requests": f"{f.max_running // f.replicas}",
    }
    wanted = {
        flag: f"-> {value} ({one.name})" for one in found for flag, value in one.settings.items()
    }
    flags = dict.fromkeys((*now, *wanted))
    return [f"  {flag} {now.get(flag, '')} {wanted.get(flag, '(stays)')}" for flag in flags]

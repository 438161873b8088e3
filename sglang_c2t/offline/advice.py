"""Rules that find what costs a running server tokens per second, and which flags to set.

Each rule reads the :class:`Facts` of a server. It returns a :class:`Finding`, with bounds of what
the cause costs, or a :class:`Fine` with the numbers that rule it out.

A row of the target's forward is wasted if it is padding or a rejected draft. No two rules count
the same row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sglang_c2t.plan.grades import SURE, Summary

#: Concurrent requests from which rows are taken to cost time. Fixed lengths and full trees began to
#: lose there in every measured table (README, "all methods").
BUSY = 16

#: A cause below this share of the tokens per second is not reported.
MATTERS = 0.03

#: A draft that survives more rarely is not worth its row, nor its layer.
SELDOM = 0.05

#: A classifier is blamed above this error, beyond that of its training, or if plans correct the
#: error, below this AUC.
MISJUDGES, LEAST_AUC = 0.1, 0.7

#: Drafts, or verifications, below which a share is not trusted.
ENOUGH = 50


@dataclass(frozen=True)
class Facts:
    """Numbers of a server and of the seconds in which it was watched; replicas summed."""

    seconds: float
    policy: str
    plans: bool  # whether the policy decides by load and cost
    packed: bool
    num_steps: int
    topk: int
    num_draft_tokens: int
    max_running: int  # requests
    running: float  # requests, mean over steps
    queued: float  # requests, mean over samples
    steps: float
    verifications: float
    proposed: float  # drafts verified
    correct: float  # drafts accepted
    padding: float  # rows
    unpacked_because: str | None = None
    replicas: int = 1
    requested_running: int | None = None  # what the flag asked for, per replica
    attention: str = ""
    # Verifications that accepted, and that had, at least so many drafts.
    accepted_at_least: Mapping[int, float] = field(default_factory=dict)
    verified_at_least: Mapping[int, float] = field(default_factory=dict)
    policy_stops: float = 0.0  # drafts that the gate ended
    failures: float = 0.0
    planned: float = 0.0  # steps
    planned_layers: float = 0.0
    rates: Mapping[int, float] = field(default_factory=dict)
    """Tokens per millisecond of the planner's best plan, by number of requests."""
    grades: Summary | None = None
    row_ms: tuple[float, float] | None = None  # per row of the target, and its standard error
    classifier: Mapping[str, Any] | None = None  # its card
    kv_used: float = 0.0
    retracted: float = 0.0

    @property
    def tokens(self) -> float:
        """Decoded tokens per second."""
        return (self.verifications + self.correct) / self.seconds

    @property
    def rows(self) -> float:
        """Rows forwarded, padding included."""
        return self.verifications + self.proposed + self.padding

    @property
    def rejected(self) -> float:
        """Rejected drafts."""
        return self.proposed - self.correct

    @property
    def accept_length(self) -> float:
        """tau: tokens per verification."""
        return 1.0 + self.correct / self.verifications

    @property
    def busy(self) -> bool:
        """Whether enough requests run that rows cost time."""
        return self.running >= BUSY

    def matters(self, gain: Gain) -> bool:
        """Whether the gain is worth a change."""
        return gain.high >= MATTERS * self.tokens


class Gain(NamedTuple):
    """Tokens per second that a change may bring, and where the bounds come from."""

    low: float
    high: float
    known_by: str


class Finding(NamedTuple):
    """A cause, and what to do."""

    name: str
    sentence: str
    gain: Gain
    settings: Mapping[str, str] = {}  # values by flag
    hint: str = ""  # what else to do, or why

    @property
    def do(self) -> str:
        """The flags with their values, and the hint."""
        return " ".join(filter(None, (*map(" ".join, self.settings.items()), self.hint)))


class Fine(NamedTuple):
    """A cause that was ruled out, and the numbers that rule it out."""

    name: str
    sentence: str


MORE_MEMORY = "give the KV cache more memory (--mem-fraction-static), or add a replica"

Rule = Callable[[Facts], Finding | Fine | None]


def judge(facts: Facts) -> tuple[list[Finding], list[Fine]]:
    """The causes, the most costly first, and what was ruled out."""
    results = [result for rule in RULES if (result := rule(facts)) is not None]
    found = [result for result in results if isinstance(result, Finding)]
    found.sort(key=lambda finding: -finding.gain.high)
    return found, [result for result in results if isinstance(result, Fine)]


def queue(f: Facts) -> Finding | Fine:
    """Find requests that wait because of the limit, or because memory is short."""
    full = f.running >= 0.85 * f.max_running
    short = f.kv_used >= 0.95 or f.retracted > 0
    if f.queued < 1.0 or not (full or short):
        return Fine(
            "queue",
            f"{f.queued:.1f} requests wait on average; {f.running:.0f} of at most {f.max_running} "
            f"run, and {f.kv_used:.0%} of the KV cache is used",
        )
    gain = _more_requests(f, f.running + f.queued)
    waiting = f"{f.queued:.0f} requests wait while {f.running:.0f} run"
    if not full:
        return Finding(
            "KV cache",
            f"{waiting}, of at most {f.max_running}: {f.kv_used:.0%} of the KV cache is used, and "
            f"{f.retracted:.0f} requests were retracted in {f.seconds:.0f} s",
            gain,
            hint=MORE_MEMORY,
        )
    sentence = f"{waiting}: no more than {f.max_running} may"
    if gain.high <= 0.0:
        hint = "add a replica: more requests at once on this one would bring no more tokens"
        return Finding("queue", sentence, gain, hint=hint)
    if f.requested_running is not None and f.requested_running * f.replicas > f.max_running:
        held = f.max_running // f.replicas
        sentence += f"; {f.requested_running} were asked for, and the server's memory holds {held}"
        return Finding("queue", sentence, gain, hint=MORE_MEMORY)
    # CUDA graphs are captured for multiples of eight.
    limit = 8 * math.ceil((f.running + f.queued) / f.replicas / 8)
    return Finding("queue", sentence, gain, {"--max-running-requests": f"{limit}"})


def packing(f: Facts) -> Finding | Fine:
    """Find verification of full drafts where the policy kept only a part."""
    share = f.padding / f.rows
    gain = _saved_rows(f, f.padding)
    if f.packed or not f.matters(gain):
        how = "packed" if f.packed else f"not packed ({f.unpacked_because})"
        return Fine("packing", f"verification is {how}, and {share:.0%} of its rows are padding")
    sentence = (
        f"verification is not packed, and {f.padding / f.steps:.0f} of "
        f"{f.rows / f.steps:.0f} rows a step ({share:.0%}) are padding: "
        f"{f.unpacked_because}"
    )
    if (f.unpacked_because or "").startswith("--c2t-verify"):
        return Finding("packing", sentence, gain, {"--c2t-verify": "auto"})
    hint = f"instead of {f.attention}, which does not pack rows"
    return Finding("packing", sentence, gain, {"--attention-backend": "fa3 or flashinfer"}, hint)


def trees(f: Facts) -> Finding | Fine | None:
    """Find trees that do not shrink under load."""
    if f.topk == 1 or f.plans:
        return None
    sentence = (
        f"trees of topk {f.topk} verify {f.proposed / f.verifications:.1f} drafts a request, of "
        f"which {f.correct / f.verifications:.1f} are accepted, at {f.running:.0f} requests at once"
    )
    gain = _without_rejected(f, f.rejected)
    if not f.busy or not f.matters(gain):
        return Fine("trees", sentence)
    return Finding(
        "trees",
        f"{sentence}: {f.rejected / f.rows:.0%} of all rows are rejected",
        gain,
        {"--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": f"{f.num_steps + 1}"},
        "(or trees that are planned: --c2t-policy default)",
    )


def classifier(f: Facts) -> Finding | Fine | None:
    """Find a gate whose confidences do not match the outcomes of its drafts."""
    g, card = f.grades, f.classifier or {}
    learnt = (
        f"{card.get('name', 'it')} learnt from {card.get('learnt_from', 'an unknown pair')} "
        f"({', '.join(card.get('origins') or ()) or 'of unknown names'})"
    )
    if g is None or g.drafts < ENOUGH:
        return Fine("classifier", learnt) if card else None
    sentence = (
        f"of {g.drafts:,.0f} verified drafts the gate promised that {g.promised:.0%} survive, and "
        f"{g.survived:.0%} (+-{g.error:.0%}) did"
    )
    gain = _without_rejected(f, f.rejected)
    if f.plans:
        sentence += (
            f" (a plan calibrates that); it ranks them with AUC {g.auc:.2f}, where 0.50 is chance; "
            f"{learnt}, and had {card.get('heldout_auc', 'an unknown one')} there"
        )
        wrong = g.auc + SURE * g.auc_error < LEAST_AUC
    else:
        trained = float(card.get("heldout_ece") or 0.0)
        sentence += f"; {learnt}, and was off by {trained:.0%} there" if card else ""
        wrong = abs(g.promised - g.survived) - g.error > trained + MISJUDGES
        if g.promised < g.survived:
            sentence += f"; it ended {f.policy_stops / f.verifications:.0%} of the drafts"
            known = "one more draft of each that was ended, if it cost nothing and survived so too"
            gain = Gain(0.0, f.policy_stops * g.survived / f.seconds, known)
    if not wrong:
        return Fine("classifier", sentence)
    return Finding(
        "classifier",
        sentence,
        gain,
        {"--c2t-classifier": "one trained on this traffic"},
        "(--c2t-record, then `python -m sglang_c2t train`)",
    )


def depth(f: Facts) -> Finding | Fine | None:
    """Find more draft steps than survive, or fewer."""
    if f.topk > 1:
        return None
    if f.plans:
        return _planned_depth(f)
    useful = useful_depth(f)
    if useful is None:
        return None
    reach = f.accepted_at_least.get(useful, 0.0) / f.verifications
    excess, lost = (
        sum(n for length, n in at_least.items() if length > useful)
        for at_least in (f.verified_at_least, f.accepted_at_least)
    )
    gain = _saved_rows(f, excess, lost=lost)
    sentence = (
        f"{reach:.0%} of {f.verifications:,.0f} verifications accept {useful} of {f.num_steps} "
        "steps or more"
    )
    if useful >= f.num_steps - 1 or not f.matters(gain):
        return Fine("steps", sentence)
    return Finding(
        "steps",
        f"{sentence}, and fewer than {SELDOM:.0%} accept {useful + 1}; {excess / f.rows:.0%} of "
        f"all rows are deeper than {useful}, and {f.num_steps - useful} draft layers that are not "
        "in that number",
        gain,
        _num_steps(useful),
    )


def policy(f: Facts) -> Finding | Fine | None:
    """Find a policy that ignores the load, under load."""
    if f.plans:
        return Fine("policy", f"{f.policy} plans by load and cost")
    if f.topk > 1 or not f.packed:
        return None
    sentence = (
        f"{f.policy} ignores the load: at {f.running:.0f} requests at once "
        f"{f.rejected / f.rows:.0%} of all rows are rejected drafts"
    )
    blamed = isinstance(classifier(f), Finding) or isinstance(depth(f), Finding)
    if blamed or not f.busy or f.rejected < 0.25 * f.rows:
        return Fine("policy", sentence)
    hint = '(POST /c2t {"policy": "auto"} tries it)'
    gain = _without_rejected(f, f.rejected)
    return Finding("policy", sentence, gain, {"--c2t-policy": "default"}, hint)


def failures(f: Facts) -> Finding | None:
    """Find a policy that raises, so that full drafts are verified."""
    if not f.failures:
        return None
    return Finding(
        "policy failures",
        f"{f.policy} failed in {f.failures:.0f} of {f.steps:.0f} steps, which verified full drafts",
        _without_rejected(f, f.rejected * min(f.failures / f.steps, 1.0)),
        hint="fix it; the server's log says where it failed",
    )


RULES: tuple[Rule, ...] = (queue, packing, trees, classifier, depth, policy, failures)


def useful_depth(f: Facts) -> int | None:
    """The largest depth that survives more than seldom; ``None`` with too few verifications."""
    if f.verifications < ENOUGH or not f.accepted_at_least:
        return None
    # Two more survivors, so that few verifications do not make a depth look useless.
    often = [d for d, n in f.accepted_at_least.items() if (n + 2.0) / f.verifications >= SELDOM]
    return min(max(often, default=1), f.num_steps)


def _planned_depth(f: Facts) -> Fine | Finding | None:
    if not f.planned:
        return None
    drafted = f.planned_layers / f.planned
    sentence = f"plans draft {drafted:.1f} of {f.num_steps} layers on average"
    last = f.accepted_at_least.get(f.num_steps, 0.0) / f.verifications
    if drafted < f.num_steps - 0.5 or last < 0.5:
        return Fine("steps", sentence)
    return Finding(
        "steps",
        f"{sentence}, and {last:.0%} of the verifications accept them all",
        Gain(0.0, f.tokens * last / f.accept_length, "one more draft each, if it cost nothing"),
        _num_steps(f.num_steps + 2),
    )


def _num_steps(number: int) -> dict[str, str]:
    tokens = f"{number + 1}"
    return {"--speculative-num-steps": f"{number}", "--speculative-num-draft-tokens": tokens}


def _more_requests(f: Facts, wanted: float) -> Gain:
    """Gain of running the ``wanted`` requests at once."""
    running = max(f.running, 1.0)
    if not f.rates:
        known = f"at most, if all ran as fast as those that run: {f.policy} measures no cost"
        return Gain(0.0, f.tokens * f.queued / running, known)
    sizes = sorted(f.rates)
    at = np.log2([running / f.replicas, wanted / f.replicas])  # plans are made per replica
    now, then = np.interp(at, np.log2(sizes), [f.rates[size] for size in sizes])
    gain = f.tokens * float(then / now - 1.0)
    return Gain(min(gain, 0.0), gain, "at most, by the planner's costs and survivals")


def _without_rejected(f: Facts, rejected: float) -> Gain:
    """Upper bound of the gain of not verifying ``rejected`` drafts: no rule knows all of them."""
    gain = _saved_rows(f, rejected)
    return Gain(0.0, gain.high, f"at most, if none of them were verified; {gain.known_by}")


def _saved_rows(f: Facts, wasted: float, lost: float = 0.0) -> Gain:
    """Gain of not forwarding the ``wasted`` rows, and losing ``lost`` tokens with them."""
    share = wasted / f.rows

    def faster(saved: float) -> float:
        left = 1.0 - lost / (f.verifications + f.correct)
        return f.tokens * (left / (1.0 - saved) - 1.0)

    if f.row_ms is None:
        known = (
            "from none, if rows cost nothing at this load, to as much as if a step took as long "
            "as it has rows: the cost of a row was not measured"
        )
        return Gain(0.0, faster(share), known)
    row_ms, error = f.row_ms
    step_ms = 1e3 * f.seconds * f.replicas / f.steps
    # Rows never cost more than their share of the forward.
    low, high = (
        faster(min(max(ms, 0.0) * wasted / f.steps / step_ms, share))
        for ms in (row_ms - SURE * error, row_ms + SURE * error)
    )
    known = (
        f"a row of the target takes {row_ms:.3f} ms (+-{SURE * error:.3f}), measured over the last "
        f"forwards, and a step {step_ms:.1f} ms with {wasted / f.steps:.0f} such rows"
    )
    return Gain(low, high, known)

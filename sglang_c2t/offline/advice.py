"""What to set on a server, and why it is slower than it could be: numbers in, sentences out.

A rule looks at the :class:`Facts` of a server for one cause. It finds it, with what it may cost,
or says by which number it is none. Nothing is read or written here.

A row of the target is wasted if it is padding, or a draft that was rejected. Each is put down to
one cause, so that no two rules blame the same row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

#: Requests at once from which rows are taken to cost what they are many: where fixed lengths and
#: whole trees began to lose in every table that was measured (README, "all methods").
BUSY = 16

#: A cause that may cost less of the tokens a second is none.
MATTERS = 0.03

#: A draft that survives so seldom is not worth its row, nor its layer.
SELDOM = 0.05

#: How much further off than where it was trained confidences are before a classifier is to blame.
MISJUDGES = 0.1

#: Drafts, or verifications, before a share of them says anything.
ENOUGH = 50

#: Deviations within which a share is taken to lie: 95 percent.
SURE = 1.96


class Grades(NamedTuple):
    """Verified drafts by how sure the gate was of them."""

    drafts: float
    promised: float
    """Mean confidence."""
    survived: float
    """Share."""
    auc: float
    """How often a draft that survived was surer than one that did not; 0.5 is chance."""
    auc_error: float
    """One deviation."""

    @property
    def error(self) -> float:
        """Of the share that survived, to both sides (Agresti and Coull's: never 0)."""
        share = (self.survived * self.drafts + 2.0) / (self.drafts + 4.0)
        return SURE * math.sqrt(share * (1.0 - share) / (self.drafts + 4.0))


class Outlook(NamedTuple):
    """What a planner expects of a number of requests, with the best plan of a depth and width."""

    requests: int
    width: int
    layers: int
    tokens: float
    milliseconds: float


@dataclass(frozen=True)
class Facts:
    """What is known of a server and of the seconds in which it was watched; replicas together."""

    seconds: float
    policy: str
    plans: bool
    """Whether the policy decides how much is drafted and verified by what that costs."""
    packed: bool
    num_steps: int
    topk: int
    num_draft_tokens: int
    max_running: int
    """Requests that may run at once, of all replicas."""
    running: float
    """Mean, of the steps."""
    queued: float
    """Mean, of the looks."""
    steps: float
    verifications: float
    proposed: float
    """Drafts verified."""
    correct: float
    """Of them accepted."""
    padding: float
    """Rows forwarded that nobody asked for."""
    unpacked_because: str | None = None
    replicas: int = 1
    requested_running: int | None = None
    """What the flag says, or what was set in its place."""
    attention: str = ""
    accepted_at_least: Mapping[int, float] = field(default_factory=dict)
    """Verifications that accepted so many drafts or more."""
    verified_at_least: Mapping[int, float] = field(default_factory=dict)
    """Verifications of so many drafts or more."""
    policy_stops: float = 0.0
    """Drafts that the gate ended."""
    gate_seconds: float = 0.0
    failures: float = 0.0
    unplanned: float = 0.0
    """Steps of a planner that did not know costs yet."""
    planned: float = 0.0
    planned_layers: float = 0.0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    quartiles: Sequence[float] = ()
    """Of predicted over measured step times; none: no planner."""
    median: float | None = None
    outlook: Sequence[Outlook] = ()
    grades: Grades | None = None
    row_ms: tuple[float, float] | None = None
    """Milliseconds that the target takes for a row, and their standard error."""
    classifier: Mapping[str, Any] | None = None
    """What its card says."""
    kv_used: float = 0.0
    retracted: float = 0.0

    @property
    def tokens(self) -> float:
        """Decoded a second."""
        return (self.verifications + self.correct) / self.seconds

    @property
    def rows(self) -> float:
        """Forwarded, padding included."""
        return self.verifications + self.proposed + self.padding

    @property
    def rejected(self) -> float:
        """Drafts."""
        return self.proposed - self.correct

    @property
    def accept_length(self) -> float:
        """tau: tokens per verification."""
        return 1.0 + self.correct / max(self.verifications, 1.0)

    @property
    def busy(self) -> bool:
        """Whether so many requests run that rows cost."""
        return self.running >= BUSY


class Cost(NamedTuple):
    """Tokens a second that a cause takes away."""

    low: float
    high: float
    known_by: str
    """What the bounds are."""


class Finding(NamedTuple):
    """A cause."""

    name: str
    sentence: str
    do: str
    cost: Cost | None
    """``None``: no number can be given, as the sentence says."""
    settings: Mapping[str, str] = {}
    """What to set, by flag."""


class Fine(NamedTuple):
    """No cause, and the number that says so."""

    name: str
    sentence: str


Rule = Callable[[Facts], Finding | Fine | None]


def judged(facts: Facts) -> tuple[list[Finding], list[Fine]]:
    """The causes, the most costly first, and what is none."""
    told = [one for rule in RULES if (one := rule(facts)) is not None]
    found = [one for one in told if isinstance(one, Finding)]
    most = {one.name: one.cost.high if one.cost else -1.0 for one in found}
    found.sort(key=lambda one: -most[one.name])
    return found, [one for one in told if isinstance(one, Fine)]


# -- the rules ---------------------------------------------------------------------------------


def queue(f: Facts) -> Finding | Fine:
    """Requests wait although more could run, or could not for want of memory."""
    full = f.running >= 0.85 * f.max_running
    short = f.kv_used >= 0.95 or f.retracted > 0
    if f.queued < 1.0 or not (full or short):
        return Fine(
            "queue",
            f"{f.queued:.1f} requests wait on average; {f.running:.0f} of {f.max_running} that may "
            f"run do, and {f.kv_used:.0%} of the KV cache is used",
        )
    wanted = f.running + f.queued
    cost = _of_more(f, wanted)
    waits = f"{f.queued:.0f} requests wait while {f.running:.0f} run"
    if full:
        number = _rounded_up(wanted / f.replicas)
        capped = ""
        if f.requested_running is not None and f.requested_running * f.replicas > f.max_running:
            capped = (
                f"; {f.requested_running} were asked for, and the server's memory holds "
                f"{f.max_running // f.replicas}"
            )
        sentence = f"{waits}: no more than {f.max_running} may{capped}"
        if cost.high <= 0.0:
            return Finding(
                "queue",
                sentence,
                "add a replica: more at once on this one would bring no more tokens",
                cost,
            )
        do = f"--max-running-requests {number}"
        if capped:
            do = "give the KV cache more memory (--mem-fraction-static), or draft fewer tokens"
            return Finding("queue", sentence, do, cost)
        return Finding("queue", sentence, do, cost, {"--max-running-requests": f"{number}"})
    return Finding(
        "KV cache",
        f"{waits}, of {f.max_running} that may: {f.kv_used:.0%} of the KV cache is used, and "
        f"{f.retracted:.0f} requests were retracted in {f.seconds:.0f} s",
        "give the KV cache more memory (--mem-fraction-static), or add a replica",
        cost,
    )


def packing(f: Facts) -> Finding | Fine:
    """Whole drafts are forwarded where only a part was asked for."""
    share = f.padding / f.rows if f.rows else 0.0
    each = f"{f.padding / max(f.steps, 1):.0f} of {f.rows / max(f.steps, 1):.0f} rows a step"
    if f.packed or not _matters(f, cost := _by_rows(f, f.padding)):
        how = "packed" if f.packed else f"not packed ({f.unpacked_because})"
        return Fine("packing", f"verification is {how}, and {share:.0%} of its rows are padding")
    asked = (f.unpacked_because or "").startswith("--c2t-verify")
    other = f"an --attention-backend that packs rows (FA3 or FlashInfer) instead of {f.attention}"
    return Finding(
        "packing",
        f"verification is not packed, and {each} ({share:.0%}) are padding: {f.unpacked_because}",
        "leave out --c2t-verify static" if asked else other,
        cost,
        {"--c2t-verify": "auto"} if asked else {"--attention-backend": "fa3 or flashinfer"},
    )


def trees(f: Facts) -> Finding | Fine | None:
    """Every request has a tree of its own, however many there are."""
    if f.topk == 1:
        return None
    each = f.proposed / max(f.verifications, 1)
    if f.plans:
        layers = f.planned_layers / f.planned if f.planned else 0.0
        return Fine("trees", f"trees are planned: {layers:.1f} of {f.num_steps} layers on average")
    sentence = (
        f"trees of topk {f.topk} verify {each:.1f} drafts a request, of which "
        f"{f.correct / max(f.verifications, 1):.1f} are accepted, at {f.running:.0f} requests at "
        "once"
    )
    cost = _of_rejected(f, f.rejected)
    if not f.busy or not _matters(f, cost):
        return Fine("trees", sentence)
    steps = f.num_steps
    return Finding(
        "trees",
        f"{sentence}: {f.rejected / f.rows:.0%} of all rows are rejected",
        "chains, --speculative-eagle-topk 1 (or trees that are planned: --c2t-policy default)",
        cost,
        {"--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": f"{steps + 1}"},
    )


def classifier(f: Facts) -> Finding | Fine | None:
    """What a gate says of drafts is not what becomes of them."""
    g = f.grades
    card = f.classifier or {}
    learnt = f"{card.get('name', 'it')} learnt from {card.get('learnt_from', 'an unknown pair')}"
    learnt += f" ({', '.join(card.get('origins') or ()) or 'of unknown names'})"
    if g is None or g.drafts < ENOUGH:
        return Fine("classifier", learnt) if card else None
    which = "drafts" if f.plans else "first drafts"
    sentence = (
        f"of {g.drafts:,.0f} verified {which} the gate promised that {g.promised:.0%} survive, and "
        f"{g.survived:.0%} (+-{g.error:.0%}) did"
    )
    if f.plans:
        sentence += f" (a plan calibrates that); it ranks them with AUC {g.auc:.2f}, where 0.50 is "
        sentence += f"chance; {learnt}, and had {card.get('heldout_auc', 'an unknown one')} there"
        if g.auc + SURE * g.auc_error >= 0.7:
            return Fine("classifier", sentence)
        return Finding("classifier", sentence, _RETRAIN, _of_rejected(f, f.rejected), _CLASSIFIER)
    sentence += f"; {learnt}, and was off by {_card_error(f):.0%} there" if card else ""
    if not misjudges(f):
        return Fine("classifier", sentence)
    if g.promised > g.survived:
        cost = _of_rejected(f, f.rejected)
        return Finding("classifier", sentence, _RETRAIN, cost, _CLASSIFIER)
    ended = f.policy_stops / max(f.verifications, 1)
    lost = f.policy_stops * g.survived / f.seconds
    known = "one more draft of each that was ended, if it cost nothing and survived as often"
    return Finding(
        "classifier",
        f"{sentence}; it ended {ended:.0%} of the drafts",
        _RETRAIN,
        Cost(0.0, lost, known),
        _CLASSIFIER,
    )


def depth(f: Facts) -> Finding | Fine | None:
    """More steps are drafted than ever survive, or fewer than would."""
    if f.topk > 1:
        return None
    if f.plans:
        return _planned_depth(f)
    useful = useful_depth(f)
    if useful is None:
        return None
    reach = f.accepted_at_least.get(useful, 0.0) / f.verifications
    sentence = (
        f"{reach:.0%} of {f.verifications:,.0f} verifications accept {useful} of {f.num_steps} "
        f"steps or more, and fewer than {SELDOM:.0%} accept {useful + 1}"
    )
    deeper = sum(n for length, n in f.accepted_at_least.items() if length > useful)
    cost = _by_rows(f, excess_rows(f), lost=deeper)
    if useful >= f.num_steps:
        sentence = f"{reach:.0%} of {f.verifications:,.0f} verifications accept all {useful} steps"
    if useful >= f.num_steps - 1 or not _matters(f, cost):
        return Fine("steps", sentence)
    wasted = excess_rows(f) / f.rows
    return Finding(
        "steps",
        f"{sentence}; {wasted:.0%} of all rows lie behind the first {useful}, and "
        f"{f.num_steps - useful} draft layers that are not in that number",
        f"--speculative-num-steps {useful} --speculative-num-draft-tokens {useful + 1}",
        cost,
        {
            "--speculative-num-steps": f"{useful}",
            "--speculative-num-draft-tokens": f"{useful + 1}",
        },
    )


def policy(f: Facts) -> Finding | Fine | None:
    """A policy that knows no load, under load."""
    if f.plans:
        return Fine("policy", f"{f.policy} plans by load and cost")
    if f.topk > 1 or not f.packed:
        return None
    left = f.rejected - excess_rows(f) if not misjudges(f) else 0.0
    cost = _of_rejected(f, max(left, 0.0))
    sentence = (
        f"{f.policy} knows no load: at {f.running:.0f} requests at once {f.rejected / f.rows:.0%} "
        "of all rows are rejected drafts"
    )
    if not f.busy or left < 0.25 * f.rows:
        return Fine("policy", sentence)
    do = '--c2t-policy default, which plans (POST /c2t {"policy": "auto"} tries it)'
    return Finding("policy", sentence, do, cost, {"--c2t-policy": "default"})


def host_time(f: Facts) -> Finding | Fine | None:
    """The gate takes the host long, where nobody weighs that."""
    share = f.gate_seconds / f.seconds / f.replicas
    sentence = f"the host spends {share:.1%} of the time in the gate"
    if f.plans:  # a plan makes steps without a gate where these bring more
        return Fine("host", sentence)
    cost = Cost(0.0, f.tokens * share, "all of that time, if nothing ran beside it")
    if share < 0.1:
        return Fine("host", sentence)
    return Finding(
        "host",
        sentence,
        "--c2t-policy default, which does without a gate where that brings more",
        cost,
        {"--c2t-policy": "default"},
    )


def predictions(f: Facts) -> Finding | Fine | None:
    """Plans go by step times that are not those measured."""
    if not f.plans or f.measured_seconds <= 0.0:
        return None
    # The median, where it is told: a pause of the machine is no price that is wrong.
    ratio = f.median or f.predicted_seconds / f.measured_seconds
    sentence = (
        f"steps of {1e3 * f.measured_seconds / max(f.planned, 1):.1f} ms were predicted to take "
        f"{ratio:.2f} of that"
    )
    if 0.7 <= ratio <= 1.4:
        return Fine("predictions", sentence)
    return Finding(
        "predictions",
        f"{sentence}, and what that costs cannot be told from it",
        "leave the machine to the server, and give it --c2t-state, which keeps prices; watch "
        "`python -m sglang_c2t top` for a minute",
        None,
    )


def young(f: Facts) -> Finding | Fine | None:
    """Nothing is planned yet."""
    if not f.plans or not f.planned:
        return None
    share = f.unplanned / f.planned
    if share < 0.2:
        return Fine("prices", f"{1 - share:.0%} of {f.planned:.0f} steps were planned by prices")
    return Finding(
        "prices",
        f"{share:.0%} of {f.planned:.0f} steps drafted everything, as prices were not known yet; "
        "what that costs cannot be told before they are",
        "wait a minute and ask again; --c2t-state keeps prices for the next start",
        None,
        {"--c2t-state": "a file"},
    )


def failures(f: Facts) -> Finding | None:
    """A policy that raises leaves drafts whole."""
    if not f.failures:
        return None
    return Finding(
        "policy failures",
        f"{f.policy} failed in {f.failures:.0f} of {f.steps:.0f} steps, whose drafts stayed whole",
        "mend it; the server's log says where it failed",
        _of_rejected(f, f.rejected * min(f.failures / max(f.steps, 1), 1.0)),
    )


RULES: tuple[Rule, ...] = (
    queue, packing, trees, classifier, depth, policy, host_time, predictions, young, failures,
)  # fmt: skip

_RETRAIN = "train one on this traffic: --c2t-record, then `python -m sglang_c2t train`"
_CLASSIFIER = {"--c2t-classifier": "one trained on this traffic"}


# -- what they go by ---------------------------------------------------------------------------


def misjudges(f: Facts) -> bool:
    """Whether a gate's confidences are further off than chance and its card explain."""
    g = f.grades
    if g is None or g.drafts < ENOUGH or f.plans:
        return False
    return abs(g.promised - g.survived) - g.error > _card_error(f) + MISJUDGES


def _card_error(f: Facts) -> float:
    return float((f.classifier or {}).get("heldout_ece") or 0.0)


def useful_depth(f: Facts) -> int | None:
    """The deepest draft that survives more than seldom; ``None``: too few were seen."""
    if f.verifications < ENOUGH or not f.accepted_at_least:
        return None
    # As if two more had survived: few verifications shall not make a depth look useless.
    seen = f.verifications
    often = [d for d, n in f.accepted_at_least.items() if (n + 2.0) / seen >= SELDOM]
    return min(max(often, default=1), f.num_steps)


def excess_rows(f: Facts) -> float:
    """Drafts verified behind the depth that is useful, of policies that do not plan; 0 in trees."""
    useful = useful_depth(f)
    if useful is None or f.topk > 1 or f.plans:
        return 0.0
    return sum(n for length, n in f.verified_at_least.items() if length > useful)


def _planned_depth(f: Facts) -> Fine | Finding | None:
    if not f.planned:
        return None
    drafted = f.planned_layers / f.planned
    sentence = f"plans draft {drafted:.1f} of {f.num_steps} layers on average"
    last = f.accepted_at_least.get(f.num_steps, 0.0) / max(f.verifications, 1.0)
    if drafted < f.num_steps - 0.5 or last < 0.5:
        return Fine("steps", sentence)
    more = f.num_steps + 2
    return Finding(
        "steps",
        f"{sentence}, and {last:.0%} of the verifications accept them all",
        f"--speculative-num-steps {more} --speculative-num-draft-tokens {more + 1}",
        Cost(0.0, f.tokens * last / f.accept_length, "one more draft each, if it cost nothing"),
        {"--speculative-num-steps": f"{more}", "--speculative-num-draft-tokens": f"{more + 1}"},
    )


def _of_more(f: Facts, wanted: float) -> Cost:
    """Of running fewer than the ``wanted`` requests."""
    running = max(f.running, 1.0)
    if not f.outlook or len(f.quartiles) != 2 or not f.median:
        known = (
            "from none to as much as if each that waits were served as fast as each that runs: "
            f"no prices were measured, as {f.policy} does not plan"
        )
        return Cost(0.0, f.tokens * f.queued / running, known)
    # Of a replica, which is what plans are made for.
    now, then = (_rate(f.outlook, n / f.replicas) for n in (running, wanted))
    low, high = (quartile / f.median for quartile in f.quartiles)
    known = (
        f"by the planner's prices and survivals; half of its step times were within "
        f"{low - 1:+.0%} and {high - 1:+.0%} of the median"
    )
    if wanted / f.replicas > max(one.requests for one in f.outlook):
        known += f", and none is priced beyond {max(one.requests for one in f.outlook)} requests"
    return Cost(f.tokens * (then / now * low - 1), f.tokens * (then / now * high - 1), known)


def _rate(outlook: Sequence[Outlook], requests: float) -> float:
    """Tokens a millisecond of the best plan for so many requests."""
    best: dict[int, float] = {}
    for one in outlook:
        best[one.requests] = max(best.get(one.requests, 0.0), one.tokens / one.milliseconds)
    sizes = sorted(best)
    return float(np.interp(math.log2(requests), np.log2(sizes), [best[n] for n in sizes]))


def _of_rejected(f: Facts, wasted: float) -> Cost:
    """Of drafts that were rejected: at most, as some of them nobody can tell before."""
    cost = _by_rows(f, wasted)
    return Cost(0.0, cost.high, f"at most, if none of them were verified; {cost.known_by}")


def _by_rows(f: Facts, wasted: float, lost: float = 0.0) -> Cost:
    """Of rows that brought nothing but the ``lost`` tokens."""
    share = wasted / f.rows if f.rows else 0.0
    if f.row_ms is None or not f.steps:
        known = (
            "from none, if rows cost nothing at this load, to as much as if a step took as long "
            "as it has rows: what a row costs was not measured"
        )
        return Cost(0.0, _faster(f, share, lost), known)
    row_ms, error = f.row_ms
    step_ms = 1e3 * f.seconds * f.replicas / f.steps
    saved = [max(ms, 0.0) * wasted / f.steps / step_ms for ms in _within(row_ms, error)]
    known = (
        f"a row of the target takes {row_ms:.3f} ms (+-{SURE * error:.3f}), measured over the last "
        f"forwards, and a step {step_ms:.1f} ms with {wasted / f.steps:.0f} such rows"
    )
    # No forward is dearer by its rows than as a whole.
    low, high = (_faster(f, min(part, share), lost) for part in saved)
    return Cost(low, high, known)


def _faster(f: Facts, share: float, lost: float) -> float:
    """Tokens a second that are gained with so large a share of all time, and without the ``lost``
    tokens.
    """
    left = 1.0 - lost / (f.verifications + f.correct)
    return f.tokens * (left / (1.0 - share) - 1.0)


def _within(value: float, error: float) -> tuple[float, float]:
    return value - SURE * error, value + SURE * error


def _matters(f: Facts, cost: Cost) -> bool:
    return cost.high >= MATTERS * f.tokens


def _rounded_up(number: float) -> int:
    """To a multiple of eight, which batches of CUDA graphs are."""
    return 8 * math.ceil(number / 8)


def grades_of(told: Sequence[Mapping[str, Sequence[float]]]) -> Grades | None:
    """Of what schedulers tell of their gates' confidences, bin by bin; ``None``: of no draft."""
    if not told:
        return None
    drafts, promised, survived = (
        np.sum([one[name] for one in told], axis=0) for name in ("drafts", "promised", "survived")
    )
    total, good = float(drafts.sum()), float(survived.sum())
    if total == 0.0:
        return None
    bad = drafts - survived
    # Within a bin nobody knows which came first: half of the pairs.
    below = np.cumsum(bad) - bad
    pairs = good * float(bad.sum())
    auc = float((survived * (below + 0.5 * bad)).sum()) / pairs if pairs else 1.0
    fewer = max(min(good, float(bad.sum())), 1.0)
    error = math.sqrt(max(auc * (1.0 - auc), 0.01) / fewer)
    return Grades(total, float(promised.sum()) / total, good / total, auc, error)

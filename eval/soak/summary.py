"""What a soak found: checks with their values and bounds, tables, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from eval import terminal
from eval.soak.faults import Ending
from eval.soak.health import Drift, Growth, Idle
from eval.soak.storm import Outcome, counted
from eval.soak.verdicts import GOOD, allowed_harm, own_of_stock


@dataclass(frozen=True)
class Check:
    """One sentence about a server, what was measured, and what is allowed."""

    name: str
    measured: str
    bound: str
    passed: bool | None  # None: too little, or too noisy, to tell


@dataclass(frozen=True)
class Bounds:
    """What is allowed; the rest must be zero."""

    drift: float = 0.05  # share of speed lost
    growth: float = 60.0  # MiB an hour
    end_seconds: float = 15.0  # of a server whose scheduler was killed


@dataclass(frozen=True)
class Findings:
    """All that was measured on one soaked server."""

    shape: str
    minutes: float
    outcomes: Sequence[Outcome]
    kinds: frozenset[str]  # of requests that must be answered whole at least once
    stock: Mapping[str, int | None]  # statuses of malformed requests without speculation
    meddling: Counter[tuple[str, str]]
    meddling_unexpected: Sequence[str]
    idle: Sequence[Idle]
    memory_mib: Sequence[float]
    growth: Growth | None
    drift: Drift | None  # of tokens a second
    cpu_drift: Drift | None  # of tokens a second of processor time
    exceptions: Counter[str]  # that the server without speculation did not log as well
    alarms: Sequence[str]
    retracted: float  # requests
    answers_at_the_end: bool
    ending: Ending | None


def checks(found: Findings, bounds: Bounds) -> list[Check]:
    """Everything that must hold."""
    verdicts = Counter(outcome.verdict for outcome in found.outcomes)
    malformed = [o for o in found.outcomes if o.kind == "malformed"]
    to_refuse = {name for name, status in found.stock.items() if allowed_harm(status) == 0}
    refused = ("refused", "cut")  # cut: aborted before the scheduler had refused it
    not_refused = [o for o in malformed if o.name in to_refuse and o.verdict not in refused]
    wrong, unexpected = verdicts["wrong"], verdicts["unexpected"]
    right = {outcome.kind for outcome in found.outcomes if outcome.verdict == "right"}
    missing = sorted(found.kinds - right)
    seen = {outcome.name for outcome in malformed}
    unseen = len(to_refuse - seen)
    leaks = [idle for idle in found.idle if not idle.clean]
    requests = f"{len(found.outcomes)} requests"
    result = [
        _none("outputs that differ from those without speculation", wrong, requests),
        _none("answers nobody expected", unexpected, requests),
        _none("malformed requests not answered with a 4xx", len(not_refused),
              f"{len(to_refuse)} kinds, {len(malformed)} requests"),
        _none("malformed kinds never sent", unseen, f"of {len(to_refuse)}"),
        _none("kinds of requests never answered right", len(missing), ", ".join(missing)),
        _none("control requests answered otherwise", len(found.meddling_unexpected),
              f"{sum(found.meddling.values())} requests"),
        Check("requests retracted", f"{found.retracted:.0f}", "> 0", found.retracted > 0),
        _none("idle moments with tokens, cache or requests left over", len(leaks),
              f"of {len(found.idle)}"),
        _none("exceptions that stock does not log", sum(found.exceptions.values()), ""),
        _none("alarms in the log", len(found.alarms), ""),
        Check("answers at the end", _yes(found.answers_at_the_end), "yes",
              found.answers_at_the_end),
        _growth(found, bounds),
        _drift("throughput drift", found.drift, bounds),
        _drift("throughput drift, by processor time", found.cpu_drift, bounds),
    ]  # fmt: skip
    if found.ending is not None:
        result.append(_ending(found.ending, bounds))
    return result


def _none(name: str, count: int, of: str) -> Check:
    return Check(name, f"{count}" + (f" ({of})" if of else ""), "0", count == 0)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _growth(found: Findings, bounds: Bounds) -> Check:
    """Fails only where the whole interval lies above the bound."""
    name, bound = "memory growth after warm-up", f"{bounds.growth:g} MiB/h or less"
    if found.growth is None:
        return Check(name, "too short a run", bound, None)
    g = found.growth
    told = f"{g.per_hour:+.0f} [{g.low:+.0f}, {g.high:+.0f}] MiB/h of {found.memory_mib[-1]:.0f}"
    return Check(name, told, bound, tell(g.per_hour <= bounds.growth, g.low > bounds.growth))


def _drift(name: str, measured: Drift | None, bounds: Bounds) -> Check:
    """Fails only where the interval lies below zero and the loss above the bound."""
    bound = f"loss < {bounds.drift:.0%}"
    if measured is None:
        return Check(name, "too short a run", bound, None)
    d = measured
    told = f"{d.change:+.1%} [{d.low:+.1%}, {d.high:+.1%}], one probe +-{d.noise:.0%}"
    good = d.change > -bounds.drift
    return Check(name, told, bound, tell(good, not good and d.high < 0))


def tell(good: bool, bad: bool) -> bool | None:
    """True if good, False if certainly bad, None otherwise."""
    return True if good else False if bad else None


def _ending(ending: Ending, bounds: Bounds) -> Check:
    told = (
        f"{ending.seconds:.1f} s, exit code {ending.returncode}, "
        f"{len(ending.orphans)} orphans, port {'free' if ending.port_free else 'taken'}"
    )
    passed = ending.clean and ending.seconds <= bounds.end_seconds
    bound = f"<= {bounds.end_seconds:g} s, not 0, 0 orphans, free"
    return Check(f"{ending.killed} killed: the server ends", told, bound, passed)


def show(console: Console, found: Findings, results: Sequence[Check]) -> None:
    """Tables of requests, control requests, SGLang's own leniences and checks."""
    console.print(_requests(found))
    console.print(_meddling(found))
    console.print(_stock(found))
    console.print(_checks(found, results))
    for outcome in [o for o in found.outcomes if o.verdict not in GOOD][:10]:
        console.print(f"{outcome.verdict}: {outcome.kind} {outcome.name}, status {outcome.status}: "
                      f"{outcome.detail}", markup=False)  # fmt: skip
    for line in [*found.meddling_unexpected, *found.exceptions, *found.alarms][:10]:
        console.print(line, markup=False)


def _requests(found: Findings) -> Table:
    verdicts = [*GOOD, "wrong", "unexpected"]
    table = terminal.table(f"{found.shape}: requests", "request", *verdicts)
    for kind, row in sorted(counted(found.outcomes).items()):
        table.add_row(kind, *(str(row.get(verdict, "")) for verdict in verdicts))
    return table


def _meddling(found: Findings) -> Table:
    table = terminal.table(f"{found.shape}: faults", "done meanwhile", "answers")
    told: dict[str, list[str]] = {}
    for (what, answer), count in sorted(found.meddling.items()):
        told.setdefault(what, []).append(f"{count} x {answer}")
    for what, answers in told.items():
        table.add_row(what, ", ".join(answers))
    return table


def _stock(found: Findings) -> Table:
    """Malformed requests that SGLang itself does not refuse."""
    table = terminal.table(
        f"{found.shape}: SGLang's own", "malformed, and not refused by stock SGLang", "stock",
        "--c2t",
    )  # fmt: skip
    ours: dict[str, set[str]] = {}
    for outcome in found.outcomes:
        ours.setdefault(outcome.name, set()).add(str(outcome.status))
    for name, status in own_of_stock(found.stock).items():
        stock = "would end" if status is None else str(status)
        table.add_row(name, stock, ", ".join(sorted(ours.get(name, {"not sent"}))))
    return table


def _checks(found: Findings, results: Sequence[Check]) -> Table:
    table = terminal.table(
        f"{found.shape}: {found.minutes:.1f} minutes", "check", "measured", "allowed", ""
    )
    for check in results:
        verdict = {True: "[green]passed[/]", False: "[bold red]FAILED[/]", None: "undecided"}[
            check.passed
        ]
        table.add_row(check.name, check.measured, check.bound, verdict)
    return table


def as_json(found: Findings, results: Sequence[Check], bounds: Bounds) -> dict[str, Any]:
    """All of it but the single requests."""
    bad = [asdict(outcome) for outcome in found.outcomes if outcome.verdict not in GOOD]
    return {
        "shape": found.shape,
        "minutes": found.minutes,
        "bounds": asdict(bounds),
        "checks": [asdict(check) for check in results],
        "requests": counted(found.outcomes),
        "not as they should be": bad,
        "control": {f"{what}: {answer}": n for (what, answer), n in found.meddling.items()},
        "malformed, stock": dict(found.stock),
        "idle": [asdict(idle) for idle in found.idle],
        "memory_mib": list(found.memory_mib),
        "growth_mib_per_hour": asdict(found.growth) if found.growth else None,
        "drift": asdict(found.drift) if found.drift else None,
        "cpu_drift": asdict(found.cpu_drift) if found.cpu_drift else None,
        "exceptions": dict(found.exceptions),
        "alarms": list(found.alarms),
        "retracted_requests": found.retracted,
        "ending": asdict(found.ending) if found.ending else None,
    }

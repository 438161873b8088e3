"""Results of ``compare``: servers, their runs, and the tables and sentences that it prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from sglang_c2t.offline.client import Streamed, full_load_rate

#: Names of the servers.
NONE, AS_IS, ADAPTIVE, C2T = "no speculation", "as-is", "adaptive", "--c2t"

#: Share by which two servers must differ for one to be called faster.
ALIKE = 0.02

#: Share of requests within the limits that a good rate needs.
GOOD = 0.95


@dataclass(frozen=True)
class Run:
    """One load, sent once."""

    load: int
    """Most requests at once."""
    answers: list[Streamed]

    @property
    def rate(self) -> float:
        """Tokens per second while so many requests ran at once, prefill included."""
        times = ((a.began, a.began + a.first_seconds, a.began + a.seconds, a.tokens)
                 for a in self.answers)  # fmt: skip
        return full_load_rate(times, self.load)

    @property
    def tokens(self) -> int:
        """Tokens over all requests."""
        return sum(answer.tokens for answer in self.answers)

    def percentiles(self) -> dict[str, list[float]]:
        """Return p50 and p99 in ms of the time to the first token, and of the time per further
        token.
        """
        first = [answer.first_seconds for answer in self.answers]
        each = [answer.token_seconds for answer in self.answers if answer.tokens > 1]
        found = {"ttft_ms": first, "tpot_ms": each or [float("nan")]}
        return {name: (1e3 * np.percentile(s, (50, 99))).tolist() for name, s in found.items()}

    def within(self, limits: Mapping[str, float]) -> float:
        """Return the share of requests within all ``limits``, which are milliseconds: ``ttft`` to
        the first token, ``tpot`` per further token, ``e2el`` to the last one.
        """
        took = (
            {"ttft": a.first_seconds, "tpot": a.token_seconds, "e2el": a.seconds}
            for a in self.answers
        )
        good = [all(1e3 * each[name] <= most for name, most in limits.items()) for each in took]
        return sum(good) / len(good)


@dataclass
class Arm:
    """One server and its runs."""

    name: str
    flags: list[str]
    needed: bool = False  # nothing can be compared without it
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """By the number of requests at once."""
    arrived: dict[float, list[Run]] = field(default_factory=dict)
    """Open loops, by the requests that arrive per second."""
    failed: str = ""
    """Why it did not start, or ended."""
    start_seconds: float = 0.0
    memory_gib: float = 0.0
    """Host memory of its processes alone."""
    cache_tokens: int = 0
    """Tokens that its KV cache holds."""
    planners: list[dict[str, Any]] = field(default_factory=list)
    """The planner's report of each scheduler, after all loads."""

    @property
    def measured(self) -> bool:
        """Whether there is a run."""
        return bool(self.runs or self.arrived)

    def add(self, run: Run, *, rate: float = 0.0) -> None:
        """Add a run; with a ``rate``, of an open loop."""
        if rate:
            self.arrived.setdefault(rate, []).append(run)
        else:
            self.runs.setdefault(run.load, []).append(run)

    def pairs(self, base: Arm) -> Iterator[tuple[Streamed, Streamed]]:
        """Yield each answer with the first one of ``base`` to the same prompt."""
        both = ((self.runs[n], base.runs[n]) for n in self.runs.keys() & base.runs.keys())
        rates = self.arrived.keys() & base.arrived.keys()
        arrived = ((self.arrived[rate], base.arrived[rate]) for rate in rates)
        for mine, theirs in chain(both, arrived):
            for run in mine:
                yield from zip(run.answers, theirs[0].answers, strict=True)

    def tokens_per_verification(self, load: int) -> float | None:
        """Return the accept length, bonus tokens included; ``None`` without speculation."""
        metas = [(a.tokens, a.meta_info) for run in self.runs[load] for a in run.answers]
        verified = [(n, m["spec_verify_ct"]) for n, m in metas if m.get("spec_verify_ct")]
        if not verified:
            return None
        # The first token of an answer comes from the prefill.
        return sum(n - 1 for n, _ in verified) / sum(count for _, count in verified)


def rates(server: Arm, loads: Sequence[int]) -> list[float]:
    """Return the tokens per second of each repeat over all of ``loads``."""
    repeats = zip(*(server.runs.get(load, ()) for load in loads), strict=False)
    return [
        sum(run.tokens for run in runs) / sum(run.tokens / run.rate for run in runs)
        for runs in repeats
    ]


def ratio(server: Arm, base: Arm, loads: Sequence[int]) -> tuple[float, float, float]:
    """Return the median, least and largest ratio of tokens per second to those of ``base``."""
    both = zip(rates(server, loads), rates(base, loads), strict=False)
    found = [mine / theirs for mine, theirs in both] or [float("nan")]
    return float(np.median(found)), min(found), max(found)


def printed(servers: Sequence[Arm], limits: Mapping[str, float]) -> Iterator[Table | str]:
    """Yield what to print of the ``servers`` that were measured."""
    loads = sorted({load for server in servers for load in server.runs})
    yield from (table(servers, load) for load in loads)
    columns = [*([load] for load in loads), *([loads] if len(loads) > 1 else [])]
    if columns:
        yield summary(servers, columns)
        yield from (verdict(servers, column) for column in columns)
    if any(server.arrived for server in servers):
        yield arrivals_table(servers, limits)
    yield prices(servers)
    yield from predictions(servers[-1].planners)
    yield agreement({server.name: differences(server, servers[0]) for server in servers})


def summary(servers: Sequence[Arm], columns: Sequence[Sequence[int]]) -> Table:
    """Return the ratios to the first server at each of ``columns``, which are loads."""
    title = f"Tokens/s over those of {servers[0].name}: median and range; * is the fastest"
    found = Table(title=title, title_justify="left", box=box.SIMPLE)
    found.add_column("at once")
    fastest = [_fastest(servers, loads) for loads in columns]
    for loads in columns:
        found.add_column(_named(loads), justify="right")
    for server in servers:
        cells = []
        for loads, best in zip(columns, fastest, strict=True):
            middle, least, most = ratio(server, servers[0], loads)
            mark = "*" if server is best else ""
            cells.append(
                f"{mark}{middle:.2f} [{least:.2f}, {most:.2f}]" if rates(server, loads) else "-"
            )
        found.add_row(server.name, *cells)
    return found


def _named(loads: Sequence[int]) -> str:
    return str(loads[0]) if len(loads) == 1 else "all"


def _fastest(servers: Sequence[Arm], loads: Sequence[int]) -> Arm:
    there = [server for server in servers if rates(server, loads)]
    return max(there, key=lambda server: ratio(server, servers[0], loads)[0])


def table(servers: Sequence[Arm], load: int) -> Table:
    """Return the figures of one load."""
    found = Table(title=f"{load} at once", title_justify="left", box=box.SIMPLE)
    found.add_column("server")
    for name in ("tokens/s", "TTFT ms, p50 p99", "TPOT ms, p50 p99", "accept length"):
        found.add_column(name, justify="right")
    for server in servers:
        if load not in server.runs:
            continue
        runs = server.runs[load]
        every = Run(load, [answer for run in runs for answer in run.answers]).percentiles()
        accepted = server.tokens_per_verification(load)
        found.add_row(
            server.name,
            f"{np.median([run.rate for run in runs]):.1f}",
            *(f"{every[name][0]:.0f} {every[name][1]:.0f}" for name in ("ttft_ms", "tpot_ms")),
            "-" if accepted is None else f"{accepted:.2f}",
        )
    return found


def arrivals_table(servers: Sequence[Arm], limits: Mapping[str, float]) -> Table:
    """Return the share of requests within the ``limits`` at each rate, and the goodput."""
    stated = ", ".join(f"{name} {most:g} ms" for name, most in limits.items())
    title = f"% of requests within {stated}, by requests per second: median and range"
    found = Table(title=title, title_justify="left", box=box.SIMPLE)
    found.add_column("server")
    rates = sorted({rate for server in servers for rate in server.arrived})
    for rate in rates:
        found.add_column(f"{rate:g}/s", justify="right")
    found.add_column("goodput", justify="right")
    for server in servers:
        cells = []
        for rate in rates:
            shares = [100 * run.within(limits) for run in server.arrived.get(rate, ())]
            middle = f"{np.median(shares):.0f} [{min(shares):.0f}, {max(shares):.0f}]"
            cells.append(middle if shares else "-")
        found.add_row(server.name, *cells, f"{goodput(server, limits):.2f}/s")
    return found


def goodput(server: Arm, limits: Mapping[str, float]) -> float:
    """Return the requests per second up to which 95 % of them are within the ``limits`` in the
    median of repeats, linear between the rates sent. It is at most the highest of these.
    """
    below, share = 0.0, 1.0
    for rate, runs in sorted(server.arrived.items()):
        now = float(np.median([run.within(limits) for run in runs]))
        if now < GOOD:
            return below + (rate - below) * (share - GOOD) / (share - now)
        below, share = rate, now
    return below


def verdict(servers: Sequence[Arm], loads: Sequence[int]) -> str:
    """Return what was fastest at these ``loads``, and whether ``--c2t`` was."""
    best = _fastest(servers, loads)
    said = f"Fastest at {_named(loads)}: {best.name}."
    mine = next((one for one in servers if one.name == C2T and rates(one, loads)), None)
    if mine is None:
        return said
    rival = _fastest([server for server in servers if server is not mine], loads)
    middle, least, most = ratio(mine, rival, loads)
    against = f"--c2t has {middle:.2f} [{least:.2f}, {most:.2f}] of the tokens of {rival.name}"
    if least <= 1.0 <= most or abs(middle - 1.0) < ALIKE:
        return f"{said} {against}, which is within the noise."
    return f"{said} {against}, which is {'faster' if middle > 1.0 else 'SLOWER'}."


def prices(servers: Sequence[Arm]) -> str:
    """Return what each server took to start, and its memory."""
    each = (
        f"{server.name} {server.start_seconds:.0f} s, {server.memory_gib:.1f} GiB of host memory, "
        f"room for {server.cache_tokens} tokens"
        for server in servers
    )
    return f"Start: {'; '.join(each)}."


def predictions(planners: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each scheduler how long its planner expected steps to take."""
    return [
        f"{C2T} expected {middle:.2f} [{low:.2f}, {high:.2f}] of the time of a step (median and "
        "quartiles of the last 512)."
        for planner in planners
        if (middle := planner["predicted_over_measured"]) is not None
        for low, high in [planner["predicted_over_measured_quartiles"]]
    ]


def differences(server: Arm, base: Arm) -> int:
    """Count the answers that differ from the first ones of ``base`` to the same prompts."""
    return sum(mine.text != theirs.text for mine, theirs in server.pairs(base))


def changed(servers: Sequence[Arm]) -> bool:
    """Whether ``--c2t`` changed more outputs than SGLang's own servers, which are the others."""
    counts = {server.name: differences(server, servers[0]) for server in servers}
    return counts.pop(C2T, 0) > max(counts.values())


def agreement(differing: Mapping[str, int]) -> str:
    """Return whether outputs agree. In bfloat16 the batch decides ties, without speculation too."""
    if not any(differing.values()):
        return "All outputs are equal."
    each = ", ".join(f"{name} {count}" for name, count in differing.items())
    return (
        f"Answers that differ from the first ones without speculation: {each}. Rounding depends on "
        "the batch, so that a server may differ from itself; float32 shows whether that is all."
    )


def facts(servers: Sequence[Arm], limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return all figures, for JSON."""
    return [
        {
            "server": server.name,
            "flags": server.flags,
            "failed": server.failed,
            "start_seconds": server.start_seconds,
            "memory_gib": server.memory_gib,
            "cache_tokens": server.cache_tokens,
            "planners": server.planners,
            "loads": {
                load: {
                    "tokens_per_second": [run.rate for run in runs],
                    "accept_length": server.tokens_per_verification(load),
                    "repeats": [run.percentiles() for run in runs],
                }
                for load, runs in server.runs.items()
            },
            "limits_ms": dict(limits),
            "rates": {
                rate: {
                    "within_limits": [run.within(limits) for run in runs],
                    "repeats": [run.percentiles() for run in runs],
                }
                for rate, runs in server.arrived.items()
            },
        }
        for server in servers
    ]

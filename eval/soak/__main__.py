"""``make soak``: minutes of load and faults on ``--c2t`` servers with a small KV pool.

A server without speculation answers every request first. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pandas as pd
import requests
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from scipy import stats

from eval import terminal
from eval.bench.provenance import provenance
from eval.metrics import SpecTotals
from eval.prompts import demo_mix
from eval.server import Launch, Server, running, speculative_flags
from eval.soak.clients import BAD, Clients, Interruptions, ask_reference, connect
from eval.soak.faults import ClassifierFile, Faults
from eval.soak.malformed import CONTEXT_LENGTH, FATAL, MALFORMED
from eval.soak.pool import make_jobs
from sglang_c2t.files import write_texts
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.offline.servers import interrupted_by_sigterm

#: Seconds a request may decode before the server aborts it.
TIME_LIMIT = 8.0
#: No warm-up request, which may exceed the time limit.
COMMON = ("--context-length", str(CONTEXT_LENGTH), "--chunked-prefill-size", "256",
          "--skip-server-warmup")  # fmt: skip
#: A pool for a dozen average requests, and a scheduler that admits more than fit.
TIGHT = ("--max-total-tokens", "1536", "--max-running-requests", "24",
         "--schedule-conservativeness", "0.1", "--enable-metrics")  # fmt: skip
#: SGLang's own memory checks, which end a server that leaks, and its time limit.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_REQ_RUNNING_TIMEOUT": str(TIME_LIMIT),
}
#: Draft layers, width and nodes, and the classifier.
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "chain": ((5,), "c2t"),
    "tree": ((5, 4, 16), "c2t-tree"),
}
WARM_UPS = 10
#: Seconds of load between two measurements.
ROUND_SECONDS = 30.0
PROBES = [greedy(prompt.text, 24) for prompt in demo_mix(8)]
#: Log lines of a scheduler that fails.
ALARMS = ("leak detected", "SIGQUIT received", "Health check failed", "watchdog timeout")
#: MiB an hour that memory may grow, and readings below which growth is not judged.
MAX_GROWTH, FEWEST_READINGS = 60.0, 6
IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class Check:
    """One sentence about a server, the measured value, and whether it holds (``None``: unknown)."""

    name: str
    measured: str
    passed: bool | None


@dataclass
class Soak:
    """One server under load and faults; :meth:`checks` says what went wrong."""

    shape: str
    server: Server
    clients: Clients
    faults: Faults
    memory: list[tuple[float, float]] = field(default_factory=list)  # hours, MiB
    leftovers: list[dict[str, int]] = field(default_factory=list)  # of idle servers
    miscounted: list[str] = field(default_factory=list)
    found: list[Check] = field(default_factory=list)

    def run(self, minutes: float, progress: Progress) -> None:
        """Load and measure in turn until time is up and every kind of request was sent."""
        for _ in range(WARM_UPS):  # the first requests compile, and may exceed the time limit
            with contextlib.suppress(requests.HTTPError, aiohttp.ClientError):
                run_load(self.server.url, PROBES, concurrency=len(PROBES))
                break
        task, start = progress.add_task(f"{self.shape}: seconds", total=60 * minutes), time.time()
        self._measure()
        while time.time() - start < 60 * minutes or self.clients.decks < 2:
            asyncio.run(self._round(time.monotonic() + ROUND_SECONDS))
            self._measure()
            bad = sum(outcome.verdict in BAD for outcome in self.clients.outcomes)
            text = f"{self.shape}: {len(self.clients.outcomes)} requests, {bad} bad; seconds"
            progress.update(task, completed=time.time() - start, description=text)
        asyncio.run(self.clients.run_once())
        self._measure()

    async def _round(self, until: float) -> None:
        async with connect() as session:
            await asyncio.gather(self.clients.run(session, until), self.faults.run(session, until))

    def _measure(self) -> None:
        """Wait until the server is idle; read memory, what it still holds, and its metrics.

        Tokens in use are read before the flush, which would repair a leaking allocator.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while any((held := _held(self.server.url)).values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.server.flush_cache()
        cached = self.server.generate(**greedy("A" * 40, 1))["meta_info"]["cached_tokens"]
        before = metrics(self.server.url)
        answers = run_load(self.server.url, PROBES, concurrency=len(PROBES)).answers
        after = metrics(self.server.url)
        counted = SpecTotals.from_meta_infos(answer.meta_info for answer in answers)
        self.leftovers.append({**held, "cached tokens after a flush": cached})
        for name, count in zip(COUNTERS, asdict(counted).values(), strict=True):
            if after[name] - before[name] != count:
                self.miscounted.append(f"{name}: {after[name] - before[name]} of {count}")
        rss = sum(process.memory_info().rss for process in self.server.processes())
        self.memory.append((time.time() / 3600, rss / 2**20))

    def checks(self, log_of_reference: str) -> list[Check]:
        """Everything that must hold."""
        outcomes = self.clients.outcomes
        verdicts = Counter(outcome.verdict for outcome in outcomes)
        right = {outcome.kind for outcome in outcomes if outcome.verdict == "right"}
        kinds = {job.kind for job in self.clients.jobs if job.end == "answer"}
        log = self.server.log.read_text(errors="replace")
        found = exceptions(log) - exceptions(log_of_reference)
        retracted = metrics(self.server.url)["sglang:num_retracted_requests_total"]
        alive = self.server.process.poll() is None
        return [
            _none("outputs differ from those without speculation", verdicts["wrong"]),
            _none("unexpected answers", verdicts["unexpected"]),
            _none("kinds never answered", kinds - right - {"longer than the time limit"}),
            _none("unexpected answers to faults", self.faults.unexpected),
            _none("idle, but not empty", [x for x in self.leftovers if any(x.values())]),
            _none("metrics that disagree with replies", self.miscounted),
            _none("exceptions that a stock server does not log", list(found)),
            _none("alarms in the log", [a for a in ALARMS if a in log]),
            Check("retracted requests", f"{retracted:.0f}", retracted > 0),
            growth(self.memory),
            Check("alive at the end", str(alive), alive),
        ]


COUNTERS = ("c2t:verifications_total", "c2t:correct_drafts_total", "c2t:proposed_drafts_total")


def metrics(url: str) -> defaultdict[str, float]:
    """Prometheus samples summed over their labels; 0 for one that does not exist yet."""
    sums: defaultdict[str, float] = defaultdict(float)
    text = requests.get(f"{url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def _held(url: str) -> dict[str, int]:
    """Requests and KV tokens that the scheduler holds; the prefix cache does not count."""
    load = requests.get(f"{url}/v1/loads", timeout=30).json()["loads"][0]
    waiting = load["num_waiting_reqs"] + load["queues"]["grammar"] + load["queues"]["paused"]
    return {
        "running requests": load["num_running_reqs"],
        "waiting requests": waiting,
        "used tokens": load["num_used_tokens"],
    }


def _none(name: str, found: int | Iterable[Any]) -> Check:
    """Passes if nothing was found."""
    things = [] if isinstance(found, int) else sorted(map(str, found))
    count = found if isinstance(found, int) else len(things)
    return Check(name, f"{count} {'; '.join(things)}".strip()[:400], count == 0)


def growth(memory: Sequence[tuple[float, float]]) -> Check:
    """Theil-Sen slope after a quarter of the readings; fails if its whole interval is above."""
    name = f"memory grows by {MAX_GROWTH:g} MiB/h or less"
    settled = np.array(memory[len(memory) // 4 :])
    if len(settled) < FEWEST_READINGS:
        return Check(name, "too short a run", None)
    slope, _, low, high = stats.theilslopes(settled[:, 1], settled[:, 0])
    passed = True if slope <= MAX_GROWTH else False if low > MAX_GROWTH else None
    return Check(name, f"{slope:+.0f} [{low:+.0f}, {high:+.0f}] of {memory[-1][1]:.0f}", passed)


def exceptions(log: str) -> Counter[str]:
    """Last lines of the tracebacks of a serving server's log, without numbers.

    At start SGLang's own ``freeze_gc`` may find its socket not listening yet, and log that.
    """
    log = log.rpartition("The server is fired up")[2]
    ends = re.findall(r"Traceback \(most recent call last\).*\n(?:[ \t].*\n|\n)*(.*)", log)
    return Counter(re.sub(r"\d+", "#", end)[:200] for end in ends)


def soak(args: argparse.Namespace, progress: Progress) -> list[Soak]:
    """Soak all shapes, one after the other."""
    jobs = make_jobs(args.seed)
    with running(Launch("without-speculation", COMMON), args.out) as server:
        task = progress.add_task(
            "reference answers", total=sum(bool(job.key) for job in jobs) + len(MALFORMED)
        )
        asked = ask_reference(server.url, jobs, MALFORMED, lambda: progress.advance(task))
        reference, stock_log = asyncio.run(asked), server.log
    soaked = []
    for shape in args.shapes:
        draft, name = SHAPES[shape]
        classifier = ClassifierFile.copied(args.out / f"{shape}-classifier", name)
        c2t = ("--c2t", "--c2t-policy", "c2t", "--c2t-classifier", str(classifier.path))
        flags = (*COMMON, *TIGHT, *speculative_flags("EAGLE3", *draft), *c2t)
        rng, ended = random.Random(args.seed), Interruptions(TIME_LIMIT)
        with running(Launch(shape, flags, env=STRICT), args.out) as server:
            malformed = (*MALFORMED, *FATAL)
            clients = Clients(server.url, jobs, malformed, reference, ended, rng)
            one = Soak(shape, server, clients, Faults(server.url, shape, classifier, ended, rng))
            try:
                one.run(args.minutes / len(args.shapes), progress)
                one.found = one.checks(stock_log.read_text(errors="replace"))
            except (requests.RequestException, aiohttp.ClientError) as error:
                one.found = [Check("the server serves to the end", repr(error)[:400], False)]
        soaked.append(one)
    return soaked


def show(console: Console, one: Soak) -> None:
    """Print tables of requests and checks, and the first bad requests."""
    outcomes = one.clients.outcomes
    frame = pd.DataFrame([asdict(outcome) for outcome in outcomes])
    console.print(f"\n{one.shape}:\n{pd.crosstab(frame.kind, frame.verdict)}\n", markup=False)
    table = terminal.table(f"{one.shape}: checks", "check", "measured", "")
    for check in one.found:
        result = {True: "passed", False: "[bold red]FAILED[/]", None: "undecided"}[check.passed]
        table.add_row(check.name, check.measured, result)
    console.print(table)
    for outcome in [o for o in outcomes if o.verdict in BAD][:10]:
        console.print(str(outcome), markup=False)


def as_json(one: Soak) -> dict[str, Any]:
    """Summary of one server."""
    return {
        "checks": [asdict(check) for check in one.found],
        "requests": Counter(f"{o.kind}: {o.verdict}" for o in one.clients.outcomes),
        "bad": [asdict(o) for o in one.clients.outcomes if o.verdict in BAD],
        "faults": {f"{fault}: {status}": n for (fault, status), n in one.faults.answers.items()},
        "memory_mib": [mib for _, mib in one.memory],
        "leftovers": one.leftovers,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m eval.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=15.0, help="of load, all shapes together; longer if a "
        "slow machine needs it to send every kind of request")  # fmt: skip
    add("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/soak") / time.strftime("%Y%m%d-%H%M%S"))
    args = parser.parse_args(argv)
    console = terminal.console()
    with progress_on(console) as progress:
        soaked = soak(args, progress)
    command = ["python", "-m", "eval.soak", *(sys.argv[1:] if argv is None else argv)]
    servers = {one.shape: as_json(one) for one in soaked}
    summary = {"provenance": provenance(command), "servers": servers}
    rows = [{"shape": one.shape, **asdict(o)} for one in soaked for o in one.clients.outcomes]
    write_texts({
        args.out / "summary.json": json.dumps(summary, indent=1),
        args.out / "requests.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    })  # fmt: skip
    for one in soaked:
        show(console, one)
    failed = [check.name for one in soaked for check in one.found if check.passed is False]
    console.print(f"{args.out / 'summary.json'}: " + (f"FAILED: {failed}" if failed else "passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    with interrupted_by_sigterm():
        sys.exit(main())

"""``make soak``: minutes of load and faults against a ``--c2t`` server with a tiny KV pool.

A server without speculation answers every request of the pool first, and then stays beside the
soaked one, idle: probes run on both in turn, so that a slow moment of the machine slows both. Exit
code 1 if any check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import requests
from rich.console import Console
from rich.progress import Progress, TaskID

from eval import terminal
from eval.bench.provenance import provenance
from eval.prompts import demo_mix
from eval.server import DRAFTS, Launch, Server, running, speculative_flags
from eval.soak.fatal import fates, table
from eval.soak.faults import ClassifierFile, Meddler, kill_child
from eval.soak.health import (
    Drift,
    Growth,
    Idle,
    Probe,
    after_warm_up,
    alarms,
    drift,
    exceptions,
    probe,
    resident,
    series,
    settle,
)
from eval.soak.malformed import CONTEXT_LENGTH, FATAL, HANGING, MALFORMED
from eval.soak.storm import Answers, Storm, reference_answers
from eval.soak.summary import Bounds, Findings, as_json, checks, show
from eval.soak.traffic import LONGEST, make_jobs
from eval.soak.verdicts import Interruptions
from sglang_c2t.files import write_texts
from sglang_c2t.offline.client import greedy
from sglang_c2t.offline.progress import progress_on

#: Seconds a request may decode before the server ends it.
TIME_LIMIT = 8.0
#: Quiet windows below which neither memory nor throughput is judged.
FEWEST = 6
RETRACTED = "sglang:num_retracted_requests_total"
COMMON = ("--context-length", str(CONTEXT_LENGTH), "--chunked-prefill-size", "256")
#: A pool for a dozen requests of average length, and a scheduler that lets in more than fit.
TIGHT = ("--max-total-tokens", "1536", "--max-running-requests", "24",
         "--schedule-conservativeness", "0.1", "--enable-metrics")  # fmt: skip
#: SGLang's own memory checks, which end a server that leaks, and its time limit.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_REQ_RUNNING_TIMEOUT": str(TIME_LIMIT),
}
#: Layers, width and nodes of a draft, and the classifier it is gated with.
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "chain": ((5,), "c2t"),
    "tree": ((5, 4, 16), "c2t-tree"),
}


def launch_of(shape: str, algorithm: str, classifier: Path) -> Launch:
    """The server that is soaked."""
    draft, _ = SHAPES[shape]
    c2t = ("--c2t", "--c2t-policy", "c2t", "--c2t-classifier", str(classifier))
    return Launch(shape, (*COMMON, *TIGHT, *speculative_flags(algorithm, *draft), *c2t), env=STRICT)


class Soak:
    """One server through all rounds: traffic and faults, then a quiet moment to measure."""

    def __init__(self, shape: str, server: Server, neighbour: Server, answers: Answers,
                 classifier: ClassifierFile, args: argparse.Namespace, progress: Progress,
                 task: TaskID) -> None:  # fmt: skip
        self.shape, self.server, self.neighbour = shape, server, neighbour
        self.classifier, self.args, self.progress, self.task = classifier, args, progress, task
        self.rng = random.Random(args.seed)
        self.interruptions = Interruptions(TIME_LIMIT)
        self.storm = Storm(
            server.url, make_jobs(args.seed), (*MALFORMED, *FATAL), answers, self.interruptions,
            self.rng, args.max_requests,
        )  # fmt: skip
        self.probes = [greedy(prompt.text, 48) for prompt in demo_mix(16, seed=args.seed + 1)]
        self.settings = {"policy": "c2t", "beta": None}
        told = requests.get(f"{server.url}/c2t", timeout=30)
        self.controllable = told.ok
        if not told.ok:
            progress.console.print(f"GET /c2t answered {told.status_code}: policies stay as set")
        self.meddling: Counter[tuple[str, str]] = Counter()
        self.unexpected: list[str] = []
        self.idle: list[Idle] = []
        self.memory: list[tuple[float, float]] = []  # minutes, MiB
        self.windows: list[list[Probe]] = []
        self.started = time.monotonic()
        self.fall = ""  # what the server did not do that it had to

    @property
    def minutes(self) -> float:
        """Since the first window."""
        return (time.monotonic() - self.started) / 60

    def run(self, minutes: float) -> None:
        """Rounds until the time or the requests are spent, or the server falls."""
        try:
            self._rounds(minutes)
        except (requests.RequestException, aiohttp.ClientError) as error:
            self.fall = f"the server fell after {self.minutes:.1f} minutes: {error!r}"[:400]

    def _rounds(self, minutes: float) -> None:
        self._window(warm_up=True)
        self.started = time.monotonic()
        self._window()
        # A slow machine takes longer to send every kind of request once.
        while (self.minutes < minutes or not self.storm.dealt) and not self.storm.spent:
            left = 60 * (minutes - self.minutes)
            self._say("load and faults")
            meddler = asyncio.run(
                self.storm.blow(min(self.args.round, max(left, 5)), self.args.concurrency,
                                self._meddler, self._tick)
            )  # fmt: skip
            self.meddling += meddler.answers
            self.unexpected += meddler.unexpected
            self._window()
        self._say("all deterministic requests once more")
        asyncio.run(self.storm.once(self.args.concurrency))
        self.idle.append(settle(self.server))

    def _meddler(self, session: aiohttp.ClientSession) -> Meddler:
        return Meddler(session, self.server.url, self.shape, self.classifier, self.interruptions,
                       self.rng, self.controllable)  # fmt: skip

    def _window(self, warm_up: bool = False) -> None:
        """Settle, measure memory, probe."""
        self._say("settling and measuring")
        if self.controllable:
            body = {**self.settings, "classifier": str(self.classifier.path)}
            requests.post(f"{self.server.url}/c2t", json=body, timeout=60).raise_for_status()
        idle = settle(self.server)
        probes = []
        for turn in range(2 if warm_up else self.args.probes):
            probes.append(probe(self.server, self.neighbour, self.probes, turn))
            self._tick()
        if not warm_up:
            self.idle.append(idle)
            self.windows.append(probes)
            self.memory.append((self.minutes, resident(self.server)))

    def _tick(self) -> None:
        self.progress.update(self.task, completed=60 * self.minutes)

    def _say(self, phase: str) -> None:
        bad = sum(outcome.verdict in ("wrong", "unexpected") for outcome in self.storm.outcomes)
        told = f"{self.shape}: {phase}; {self.storm.sent} requests, {bad} bad"
        self.progress.update(self.task, description=told)

    def findings(self) -> Findings:
        """Everything measured; a server that still stands loses its scheduler at the end."""
        stands = not self.fall and self.server.process.poll() is None
        retracted = series(self.server.url, RETRACTED)[RETRACTED] if stands else 0.0
        known = exceptions(self.neighbour.log.read_text(errors="replace"))
        log = self.server.log.read_text(errors="replace")
        logged = Counter({e: n for e, n in exceptions(log).items() if e not in known})
        answers = stands and self.server.generate(**greedy("A", 4))["meta_info"]["id"] != ""
        memory = after_warm_up(self.memory)
        return Findings(
            shape=self.shape,
            minutes=self.minutes,
            outcomes=self.storm.outcomes,
            kinds=frozenset(
                job.kind for job in self.storm.jobs if job.end == "answer" and job.kind != LONGEST
            ),
            stock=self.storm.answers.statuses,
            meddling=self.meddling,
            meddling_unexpected=self.unexpected,
            idle=self.idle,
            memory_mib=[mib for _, mib in self.memory],
            growth=_growth([m for m, _ in memory], [mib for _, mib in memory]),
            drift=_drift([[p.speed for p in window] for window in self.windows]),
            cpu_drift=_drift([[p.cpu_speed for p in window] for window in self.windows]),
            exceptions=logged,
            alarms=[*alarms(log), *filter(None, [self.fall])],
            retracted=retracted,
            answers_at_the_end=answers,
            ending=kill_child(self.server, "sglang::scheduler") if stands else None,
        )


def _growth(minutes: Sequence[float], mib: Sequence[float]) -> Growth | None:
    return Growth.of(minutes, mib) if len(minutes) >= FEWEST else None


def _drift(windows: Sequence[Sequence[float]]) -> Drift | None:
    return drift(windows) if len(windows) >= FEWEST else None


def soak(args: argparse.Namespace, console: Console) -> list[Findings]:
    """All shapes, one after the other, beside the same neighbour."""
    shapes = list(SHAPES) if args.shape == "both" else [args.shape]
    done = []
    with (
        progress_on(console) as progress,
        running(Launch("without-speculation", COMMON), args.out) as neighbour,
    ):
        answers = _reference(neighbour, args, progress)
        for shape in shapes:
            classifier = ClassifierFile.copied(args.out / f"{shape}-classifier", SHAPES[shape][1])
            seconds = 60 * args.minutes / len(shapes)
            task = progress.add_task(f"{shape}: starting the server", total=seconds)
            launch = launch_of(shape, args.algorithm, classifier.path)
            with running(launch, args.out) as server:
                one = Soak(shape, server, neighbour, answers, classifier, args, progress, task)
                one.run(args.minutes / len(shapes))
                found = one.findings()
            progress.update(task, description=f"{shape}: done", completed=seconds)
            done.append(found)
            _keep(args, found, one.windows)
    return done


def _reference(neighbour: Server, args: argparse.Namespace, progress: Progress) -> Answers:
    jobs = make_jobs(args.seed)
    total = sum(bool(job.key) for job in jobs) + len(MALFORMED)
    task = progress.add_task("answers without speculation", total=total)
    ask = reference_answers(neighbour.url, jobs, MALFORMED, lambda: progress.advance(task))
    return asyncio.run(ask)


def _keep(args: argparse.Namespace, found: Findings, windows: Sequence[Sequence[Probe]]) -> None:
    """Single requests and probes, for whoever wants to look closer."""
    rows = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in found.outcomes)
    told = json.dumps([[asdict(p) for p in window] for window in windows])
    write_texts({args.out / f"{found.shape}-requests.jsonl": rows,
                 args.out / f"{found.shape}-probes.json": told})  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if any check failed."""
    args = _arguments(argv)
    console = terminal.console()
    came_from = provenance(["python", "-m", "eval.soak", *(sys.argv[1:] if argv is None else argv)])
    if args.fatal:
        return _show_fates(args, console, came_from)
    started = datetime.datetime.now(datetime.UTC).isoformat()
    bounds = Bounds(args.max_drift / 100, args.max_growth)
    done = [(found, checks(found, bounds)) for found in soak(args, console)]
    summary = {
        "format": 1,
        "started": started,
        "provenance": came_from,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "servers": [as_json(found, results, bounds) for found, results in done],
    }
    write_texts({args.out / "summary.json": json.dumps(summary, indent=1)})
    for found, results in done:
        show(console, found, results)
    failed = [check.name for _, results in done for check in results if check.passed is False]
    console.print(f"{args.out / 'summary.json'}: " + (f"FAILED: {failed}" if failed else "passed"))
    return 1 if failed else 0


def _show_fates(args: argparse.Namespace, console: Console, came_from: dict[str, Any]) -> int:
    """What ends stock servers; 1 if a ``--c2t`` server fares worse."""
    classifier = ClassifierFile.copied(args.out / "classifier", SHAPES["chain"][1])
    launches = [Launch("stock", COMMON), launch_of("chain", args.algorithm, classifier.path)]
    with progress_on(console) as progress:
        task = progress.add_task("fatal requests", total=len((*FATAL, *HANGING)) * len(launches))
        found = fates(launches, args.out, lambda: progress.advance(task))
    told = {"format": 1, "provenance": came_from, "fates": [asdict(fate) for fate in found]}
    write_texts({args.out / "fatal.json": json.dumps(told, indent=1)})
    console.print(table(found))
    pairs = zip(found[::2], found[1::2], strict=True)
    return int(any(stock.answers and not ours.answers for stock, ours in pairs))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=_positive, default=15.0, help="of load, all shapes together; "
        "more where a slow machine needs them to send each kind of request")  # fmt: skip
    add("--shape", choices=(*SHAPES, "both"), default="both",
        help="both: one after the other, half the time each")  # fmt: skip
    add("--algorithm", choices=sorted(DRAFTS), default="EAGLE3")
    add("--concurrency", type=int, default=24, help="clients at once")
    add("--max-requests", type=int, default=50_000, help="to one server")
    add("--round", type=_positive, default=30.0, help="seconds between quiet windows")
    add("--probes", type=int, default=6, help="of throughput in each window")
    add("--max-drift", type=_positive, default=5.0, help="per cent of throughput")
    add("--max-growth", type=_positive, default=60.0, help="of memory, MiB an hour")
    add("--fatal", action="store_true",
        help="no soak: send what ends a stock server to servers of their own (about 7 minutes)",
        )  # fmt: skip
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/soak") / time.strftime("%Y%m%d-%H%M%S"),
        help="default: runs/soak/<time>")  # fmt: skip
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}.")
    return value


if __name__ == "__main__":
    with terminal.interrupted_by_sigterm():
        sys.exit(main())

"""Is a server as it was? Memory, KV cache, request slots, throughput, and what its log says.

Reading a server and judging the readings are separate functions, so that the second need no server.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import requests
from prometheus_client.parser import text_string_to_metric_families
from scipy import stats

from eval.server import Server
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.offline.compare import interval

MIB = 2**20
IDLE_SECONDS = 60.0
"""A server without requests is idle after its last one; a paused or stuck one never is."""


# Readings.


@dataclass(frozen=True)
class Idle:
    """What an idle server holds. All but ``total`` should be zero."""

    running: int  # requests
    waiting: int  # requests, in any queue
    used: int  # KV tokens neither free nor in the prefix cache; target and draft share the slots
    cached: int  # tokens a request finds in the prefix cache after a flush
    total: int  # KV tokens of the pool

    @property
    def clean(self) -> bool:
        """Whether nothing is held."""
        return not (self.running or self.waiting or self.used or self.cached)


def load(url: str) -> dict[str, Any]:
    """The scheduler's own report, published at every step and when it falls idle."""
    told: dict[str, Any] = requests.get(f"{url}/v1/loads", timeout=30).json()["loads"][0]
    return told


def settle(server: Server) -> Idle:
    """Wait until the server is idle, flush its cache, and read what it still holds.

    ``used`` is read before the flush, which would set a leaking allocator right.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        held = load(server.url)
        waiting = held["num_waiting_reqs"] + held["queues"]["grammar"] + held["queues"]["paused"]
        if held["num_running_reqs"] + waiting + held["num_used_tokens"] == 0:
            break
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    server.flush_cache()
    meta = server.generate(**greedy("A" * 40, 1))["meta_info"]
    return Idle(
        held["num_running_reqs"],
        waiting,
        held["num_used_tokens"],
        meta["cached_tokens"],
        held["max_total_num_tokens"],
    )


def resident(server: Server) -> float:
    """MiB of memory that the server's processes hold together."""
    return sum(process.memory_info().rss for process in server.processes()) / MIB


def series(url: str, *names: str) -> dict[str, float]:
    """Sums of Prometheus series over their labels; 0 for one that is not there yet."""
    sums = dict.fromkeys(names, 0.0)
    text = requests.get(f"{url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    return sums


@dataclass(frozen=True)
class Probe:
    """The same batch on both servers, one right after the other, seconds."""

    soaked: float
    neighbour: float
    soaked_cpu: float  # of all its processes
    neighbour_cpu: float

    @property
    def speed(self) -> float:
        """Of the soaked server, in units of its idle neighbour's."""
        return self.neighbour / self.soaked

    @property
    def cpu_speed(self) -> float:
        """The same by processor time, which other programs on the machine change less."""
        return self.neighbour_cpu / self.soaked_cpu


def probe(soaked: Server, neighbour: Server, bodies: Sequence[dict[str, Any]], turn: int) -> Probe:
    """Time ``bodies`` at once on both, from empty caches; who is first takes turns."""
    order = (soaked, neighbour) if turn % 2 else (neighbour, soaked)
    wall, cpu = {}, {}
    for server in order:
        server.flush_cache()
        before = server.cpu_seconds()
        wall[server.url] = run_load(server.url, bodies, concurrency=len(bodies)).seconds
        cpu[server.url] = server.cpu_seconds() - before
    return Probe(*(times[s.url] for times in (wall, cpu) for s in (soaked, neighbour)))


# Judgements.


@dataclass(frozen=True)
class Growth:
    """Slope of a line through medians of pairs (Theil and Sen), and its 95 % interval."""

    per_hour: float
    low: float
    high: float

    @classmethod
    def of(cls, minutes: Sequence[float], values: Sequence[float]) -> Growth:
        """Of values measured at ``minutes``; ValueError with fewer than three."""
        if len(minutes) < 3:
            raise ValueError(f"a slope needs 3 measurements or more, got {len(minutes)}.")
        slope, _, low, high = stats.theilslopes(values, np.asarray(minutes) / 60)
        return cls(float(slope), float(low), float(high))


def after_warm_up(values: Sequence[Any], share: float = 0.25) -> Sequence[Any]:
    """All but the first ``share``, but three at least where there are so many."""
    return values[min(int(len(values) * share), max(len(values) - 3, 0)) :]


@dataclass(frozen=True)
class Drift:
    """Change of speed between the first and the last third of windows, and its 95 % interval."""

    change: float  # 0.01: one per cent faster
    low: float
    high: float
    noise: float  # half the distance of the quartiles of single probes, as a share of their median


def drift(windows: Sequence[Sequence[float]], seed: int = 0, num_resamples: int = 2000) -> Drift:
    """Speeds by window, in order of time; medians of thirds are compared.

    Windows are resampled, not probes: probes of one window share the machine's mood.
    ValueError with fewer than three windows.
    """
    if len(windows) < 3:
        raise ValueError(f"drift needs 3 windows or more, got {len(windows)}.")
    third = len(windows) // 3
    first, last = windows[:third], windows[-third:]
    rng = np.random.default_rng(seed)

    def drawn(some: Sequence[Sequence[float]]) -> list[float]:
        chosen = rng.integers(len(some), size=len(some))
        return [speed for i in chosen for speed in rng.choice(some[i], len(some[i]))]

    changes = [_change(drawn(first), drawn(last)) for _ in range(num_resamples)]
    every = [speed for window in windows for speed in window]
    low, high = interval(np.array(changes))
    quartiles = np.percentile(every, [25, 75])
    noise = float((quartiles[1] - quartiles[0]) / 2 / np.median(every))
    once = _change([s for w in first for s in w], [s for w in last for s in w])
    return Drift(once, low, high, noise)


def _change(before: Sequence[float], after: Sequence[float]) -> float:
    return float(np.median(after) / np.median(before) - 1)


def exceptions(log: str) -> Counter[str]:
    """Exceptions of a log by their last line, numbers left out.

    The last line of a traceback is the first that is not indented.
    """
    found: Counter[str] = Counter()
    lines = iter(log.splitlines())
    for line in lines:
        if "Traceback (most recent call last)" not in line:
            continue
        last = next((text for text in lines if text.strip() and not text[0].isspace()), "cut off")
        found[re.sub(r"\d+", "#", last)[:200]] += 1
    return found


#: What a scheduler says before it gives up.
ALARMS = ("leak detected", "SIGQUIT received", "Health check failed", "watchdog timeout")


def alarms(log: str) -> list[str]:
    """Lines of a log that tell of a broken server, 200 characters of each."""
    return [line[:200] for line in log.splitlines() if any(alarm in line for alarm in ALARMS)]

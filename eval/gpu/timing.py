"""Timing device work: by CUDA events, or as replays of a graph where launches would hide it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

#: Calls that are timed on the device and on the host, and rounds of works that a graph holds.
REPEATS, HOST_REPEATS, ROUNDS = 20, 100, 8


def briefly() -> None:
    """From now on as few as can be: what is timed runs, and its times say nothing."""
    global REPEATS, HOST_REPEATS, ROUNDS
    REPEATS, HOST_REPEATS, ROUNDS = 2, 2, 1


class Timing(NamedTuple):
    """Seconds of one call."""

    median: float
    low: float
    """A tenth of the calls are faster,"""
    high: float
    """and a tenth slower."""

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """From single measurements, at least one."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        )


def by_events(work: Callable[..., object], *inputs: object) -> Timing:
    """Time on the device between two events, one pair per call of ``work(*inputs)``."""
    for _ in range(3):
        work(*inputs)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        work(*inputs)
        event.record()
    torch.cuda.synchronize()
    return Timing.of([a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)])


def by_graph(works: list[Callable[[], object]]) -> Timing:
    """Time of one call inside a graph of some rounds of all ``works``.

    The works do the same on other inputs, so that none finds its own in the cache.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for work in works:  # compiles, and makes what capture may not allocate
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for work in works:
                work()
    calls = ROUNDS * len(works)
    timing = by_events(graph.replay)
    return Timing(*(seconds / calls for seconds in timing))


def by_host(work: Callable[[], object]) -> Timing:
    """Time on the host, the device idle before each call and waited for after it."""
    seconds, warmup = [], HOST_REPEATS // 10
    for i in range(warmup + HOST_REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= warmup:
            seconds.append(time.perf_counter() - begin)
    return Timing.of(seconds)

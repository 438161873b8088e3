"""Runs the cells of a plan on real servers: starts them, measures, keeps the records.

A cell that fails, or a server that dies, is reported and the others go on.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.progress import Progress

from eval.bench import client
from eval.bench.config import BenchConfig, MethodConfig
from eval.bench.datasets import Sample
from eval.bench.methods import PlannedCell, passes, rounds
from eval.bench.records import Cell, has_cell, write_cell
from eval.gpu.step_clock import KEY, decoding, since
from eval.server import Launch, Server, running
from sglang_c2t.offline.client import run_load
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.offline.servers import ServerError

WARM_UP_TOKENS = 32
SEEN = 16  # warm-up requests of a method that plans by what it has seen of a load
LOG_LINES = 5
SPARE_GIB = 1.5  # for the client, and for files the servers have mapped
FAILED = "failed"


class CellError(RuntimeError):
    """A cell could not be measured."""


class OutOfTime(Exception):
    """The budget does not hold another server or cell."""


class Budget:
    """Seconds a call may take, and what its parts took so far."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str, guess: float) -> Iterator[None]:
        """Do a part; OutOfTime unless there is time for the longest of its name, or ``guess``."""
        begin = time.monotonic()
        if self._end - begin < 1.2 * self._longest.get(name, guess):
            raise OutOfTime
        yield
        self._longest[name] = max(time.monotonic() - begin, self._longest.get(name, 0.0))


#: What a server that misbehaves or is gone can raise here.
ERRORS = (
    CellError,
    aiohttp.ClientError,
    OSError,
    ValueError,
)


@dataclass
class Runner:
    """Measures the cells that are not done yet; ``failures`` says what went wrong."""

    config: BenchConfig
    folder: Path
    samples: Sequence[Sample]
    tokenizer: str
    servers: Mapping[str, Launch]  # by method
    console: Console
    budget: Budget = field(default_factory=Budget)
    failures: list[str] = field(default_factory=list)
    _warm: set[tuple[int, str, float, int]] = field(default_factory=set)
    _cached: dict[int, set[int]] = field(default_factory=dict)  # prompts servers hold, by process

    def run(self, cells: Sequence[PlannedCell]) -> None:
        """Measure ``cells`` but those that are done."""
        todo = [cell for cell in cells if not has_cell(self.folder, cell.key)]
        if done := len(cells) - len(todo):
            self.console.print(f"{done} of {len(cells)} cells are done already.")
        if not todo:
            return
        wanted = {cell.key.method for cell in todo}
        needed = [name for name in self.servers if name in wanted]
        together = self._together_is_possible(len(needed))
        with progress_on(self.console) as progress:
            done_cells = progress.add_task("cells", total=len(todo))
            for names, mine in (rounds if together else passes)(self.config, todo, needed):
                with self._fleet(names, progress) as fleet:
                    for cell in mine:
                        self._try(cell, fleet, progress)
                        progress.advance(done_cells)

    def _together_is_possible(self, num_servers: int) -> bool:
        """Whether all servers run at once; "auto" asks for the memory and says what it found."""
        server = self.config.server
        if server.mode != "auto":
            return server.mode == "together"
        needed = num_servers * server.memory_gib + SPARE_GIB
        free = psutil.virtual_memory().available / 2**30
        how = "all at once" if free >= needed else "one at a time"
        self.console.print(
            f"{num_servers} servers, {how}: together they need {needed:.1f} GiB of memory, "
            f"{free:.1f} GiB are free"
        )
        return free >= needed

    @contextlib.contextmanager
    def _fleet(self, names: Sequence[str], progress: Progress) -> Iterator[dict[str, Server]]:
        """Running servers by method, started a few at a time; those that fail are left out."""
        workers = ThreadPoolExecutor(self.config.server.starting)
        starting = progress.add_task("starting servers", total=len(names))
        stacks = {name: contextlib.ExitStack() for name in names}
        over = threading.Event()

        def start(name: str) -> tuple[str, Server | ServerError]:
            try:
                server = running(self.servers[name], self.folder / "logs", over)
                return name, stacks[name].enter_context(server)
            except ServerError as error:
                return name, error

        try:
            fleet = {}
            with self.budget.part("server", guess=120.0):
                for name, server in workers.map(start, names):
                    progress.advance(starting)
                    if isinstance(server, ServerError):
                        last = "\n".join(str(server).splitlines()[-LOG_LINES:])
                        log = self.folder / "logs" / f"{self.servers[name].name}.log"
                        self._fail(f"the server of {name} did not start, see {log}: ...\n{last}")
                    else:
                        fleet[name] = server
            progress.remove_task(starting)
            yield fleet
        finally:
            over.set()  # servers that are just starting end first
            workers.shutdown(cancel_futures=True)
            with ThreadPoolExecutor(len(names)) as closing:
                list(closing.map(contextlib.ExitStack.close, stacks.values()))

    def _try(self, cell: PlannedCell, fleet: dict[str, Server], progress: Progress) -> None:
        """Measure a cell and keep it, or say why not."""
        method = next(m for m in self.config.methods if m.name == cell.key.method)
        server = fleet.get(method.name)
        if server is None or server.process.poll() is not None:
            self._fail(f"{cell.key}: not measured, its server is not running")
            return
        bar = progress.add_task(str(cell.key), total=cell.prompts)
        try:
            with self.budget.part(f"{cell.prompts} prompts", guess=20.0):
                found = self.measure(cell, method, server, lambda: progress.advance(bar))
            write_cell(self.folder, found)
            self.console.print(f"{cell.key}: {found.tokens_per_second:.0f} tokens/s", markup=False)
        except ERRORS as error:
            self._fail(f"{cell.key}: {error}")
        finally:
            progress.remove_task(bar)

    def _fail(self, reason: str) -> None:
        self.failures.append(reason)
        self.console.print(f"FAILED {reason}", markup=False)

    def measure(
        self,
        cell: PlannedCell,
        method: MethodConfig,
        server: Server,
        on_answer: Callable[[], None] = lambda: None,
    ) -> Cell:
        """One cell, from a cache that is empty or holds its prompts; CellError if any of its
        requests fails.
        """
        numbers = self.numbers(cell)
        samples = [self.samples[number] for number in numbers]
        bodies = [self.body(cell, number) for number in numbers]
        self._warm_up(cell, method, server, samples, bodies[0]["sampling_params"])
        if self.config.requests.cached_prompts:
            self._cache_prompts(server, numbers)
        else:
            server.flush_cache()
        series, state = self._series(server), server.internal_state()
        busy = _cpu_seconds(server)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        measured = client.measure(
            server.url,
            self.tokenizer,
            samples,
            cell.key.concurrency,
            bodies,
            self.config.requests,
            self.folder / "logs" / "client.log",
            on_answer,
        )
        busy = _cpu_seconds(server) - busy
        after = server.internal_state()
        clock = decoding(since(state[KEY], after[KEY])) if KEY in after else None
        seconds, tokens = (
            (measured.duration_s, measured.output_tokens)
            if clock is None
            else (clock.seconds, clock.tokens)
        )
        result = Cell(
            method=cell.key.method,
            temperature=cell.key.temperature,
            concurrency=cell.key.concurrency,
            repeat=cell.key.repeat,
            started=started,
            duration_s=measured.duration_s,
            output_tokens=measured.output_tokens,
            tokens_per_second=tokens / seconds,
            client=measured.client,
            work=client.grown(_counters(state), _counters(after)),
            metrics=client.grown(series, self._series(server)),
            server_argv=_argv(server),
            requests=tuple(replace(r, index=numbers[r.index]) for r in measured.requests),
            clock=None if clock is None else clock._asdict(),
            planner=after.get("c2t", {}).get("planner"),
            cpu_seconds=busy,
        )
        if failed := measured.failures:
            path = write_cell(self.folder / FAILED, result)
            prompt = numbers[failed[0].index]
            raise CellError(
                f"{len(failed)} of {len(samples)} requests failed, prompt {prompt} with: "
                f"{failed[0].error}; all answers: {path}"
            )
        if self.config.requests.cached_prompts:
            _check_cached(result)
        return result

    def numbers(self, cell: PlannedCell) -> list[int]:
        """Numbers of the prompts that a cell sends: the first ones of the data set, or with
        ``fresh_prompts`` those after the ones that earlier repeats sent, in a ring.
        """
        if not self.config.requests.fresh_prompts:
            return list(range(cell.prompts))
        return self._numbers(cell.key.repeat * cell.prompts, cell.prompts)

    def _numbers(self, start: int, count: int) -> list[int]:
        return [number % len(self.samples) for number in range(start, start + count)]

    def body(self, cell: PlannedCell, number: int) -> dict[str, Any]:
        """The request's body without its prompt; the seed is the same for all methods."""
        wanted = self.config.requests
        params: dict[str, Any] = {
            "temperature": cell.key.temperature,
            "max_new_tokens": wanted.max_new_tokens,
        }
        if wanted.seeded and cell.key.temperature > 0:
            params["sampling_seed"] = (self.config.seed + cell.key.repeat) * 1_000_003 + number
        return {"sampling_params": params, "stream": wanted.stream}

    def _series(self, server: Server) -> dict[str, float]:
        return client.scrape(server.url) if self.config.server.metrics else {}

    def _warm_up(
        self,
        cell: PlannedCell,
        method: MethodConfig,
        server: Server,
        samples: Sequence[Sample],
        params: dict[str, Any],
    ) -> None:
        """A few short requests, once for each method and temperature on a server.

        On a GPU once for each batch size as well: each has a graph. So for
        methods that plan by what they have seen of a load, of which they see more, and before
        their own prompts others, where each repeat has prompts of its own.
        """
        at_once, wanted = cell.key.concurrency, self.config.requests
        rung = at_once if method.plans or self.config.server.device == "cuda" else 0
        once = (server.process.pid, method.name, cell.key.temperature, rung)
        if once in self._warm:
            return
        count = min(wanted.warm_up, max(2 * at_once, SEEN if method.plans else 0))
        if method.plans and wanted.fresh_prompts:
            before = self._numbers(cell.key.repeat * cell.prompts - count, count)
            samples = [self.samples[number] for number in before]
        warm = [_short(sample, params, WARM_UP_TOKENS) for sample in samples[:count]]
        if warm:
            run_load(server.url, warm, concurrency=at_once)
        self._warm.add(once)

    def _cache_prompts(self, server: Server, numbers: Sequence[int]) -> None:
        """Have the prefix cache hold the prompts of these ``numbers``."""
        known = self._cached.setdefault(server.process.pid, set())
        new = [number for number in numbers if number not in known]
        if new:
            prompts = [_short(self.samples[number], {"temperature": 0.0}, 1) for number in new]
            run_load(server.url, prompts, concurrency=8)
            known.update(new)


def _short(sample: Sample, sampling_params: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """A request for a few tokens after a prompt."""
    prompt = sample.prompt
    return {
        **({"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}),
        "sampling_params": {**sampling_params, "max_new_tokens": max_new_tokens},
    }


def _check_cached(cell: Cell) -> None:
    """CellError where most of the prompts were not in the cache."""
    cached = sum(request.meta.get("cached_tokens", 0) for request in cell.requests)
    tokens = sum(request.prompt_len for request in cell.requests)
    if cached < tokens / 2:
        raise CellError(
            f"{cached} of {tokens} prompt tokens came from the prefix cache, and "
            "requests.cached_prompts promises all: the server needs more KV memory, a smaller "
            "--page-size, or a radix cache"
        )


def _counters(state: dict[str, Any]) -> dict[str, Any]:
    return dict(state.get("c2t", {}).get("counters", {}))


def _cpu_seconds(server: Server) -> float:
    """CPU time of its processes. Other work on the machine hardly changes it."""
    times = [process.cpu_times() for process in server.processes()]
    return float(sum(each.user + each.system for each in times))


def _argv(server: Server) -> list[str]:
    return [str(part) for part in server.process.args]

"""Servers that start side by side in the background, and start again where one of them dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.gpu import graft, models, plugins
from eval.gpu.results import Results, elapsed
from eval.server import Launch, Server, environment, gpu_environment, speculative_flags
from sglang_c2t.offline.servers import free_port, start

READY = "The server is fired up"

#: How torch and SGLang report that the GPU has too little memory. Advice to lower
#: ``--mem-fraction-static`` says nothing: SGLang gives it after any error of a capture.
OUT_OF_MEMORY = ("out of memory", "not enough memory")

#: Log lines that say how a server serves: our plugin's, CUDA graphs, memory.
TELLING = ("C2T", "graft:", "apture", "KV Cache is allocated", "max_total_num_tokens", "mem usage")

#: Process groups that were started. A killed call leaves them on the GPU; the next one ends them.
STARTED = "sprint-servers.pids"


@dataclass(frozen=True)
class ServerSpec:
    """A server to start, and the flags to add in turn where it dies at its start."""

    name: str
    shape: str  # a name of models.SHAPES; empty for the trained pair at its own size
    batches: tuple[int, ...]  # with a CUDA graph; the largest is the limit of running requests
    flags: tuple[str, ...] = ()
    c2t: bool = False
    drafts: tuple[int, int, int] | None = None  # steps, topk and tokens; None: no speculation
    fallbacks: tuple[tuple[str, ...], ...] = ()

    def with_fewer_requests(self) -> ServerSpec | None:
        """The same server for at most half as many requests; ``None`` if it serves one."""
        half = max(self.batches) // 2
        if not half:
            return None
        return replace(self, batches=(*(b for b in self.batches if b < half), half))


@dataclass
class Running:
    """A server of the fleet, ready or not."""

    spec: ServerSpec
    server: Server
    began: float
    attempt: int  # index of its fallback, from 1; 0 for none
    ready: bool = False
    dead: bool = False
    policy: dict[str, Any] | None = None  # what it was switched to
    warm: set[tuple[str, int]] = field(default_factory=set)  # methods and batch sizes

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self.ready and self.server.process.poll() is None

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of its rows."""
        flags = " ".join(self.spec.fallbacks[self.attempt - 1]) if self.attempt else ""
        return {"server": self.spec.name, "requests": max(self.spec.batches), "flags": flags}

    def generate(self, texts: Sequence[str], tokens: int, **more: Any) -> list[Any]:
        """Greedy answers of at most ``tokens`` to ``texts``, all requests at once."""
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        replies = self.server.generate(90, text=list(texts), sampling_params=sampling, **more)
        return list(replies)


class Fleet:
    """Servers by name. ``check`` must be called for those that die to be restarted."""

    def __init__(
        self, results: Results, work: Path, flags: Sequence[str], pair: models.Pair
    ) -> None:
        self._results, self._work, self._flags, self._pair = results, work, tuple(flags), pair
        self._logs: list[Path] = []
        self.running: dict[str, Running] = {}

    def start(self, spec: ServerSpec, attempt: int = 0) -> None:
        """Start a server and return at once; ``attempt`` chooses the fallback's flags."""
        log = self._work / f"{len(self._logs)}-{spec.name}.log"
        self._logs.append(log)
        port = free_port()
        process = start(*self.command(spec, attempt, port), log)
        with _started().open("a") as sink:
            sink.write(f"{process.pid}\n")
        server = Server(f"http://127.0.0.1:{port}", process, log)
        self.running[spec.name] = running = Running(spec, server, elapsed(), attempt)
        self._results.log("starting {server}, {requests} requests {flags}".format(**running.facts))

    def command(
        self, spec: ServerSpec, attempt: int, port: int
    ) -> tuple[list[str], dict[str, str]]:
        """Command line and environment of a server. SGLang takes the last of equal flags."""
        flags = [*self._flags, "--max-running-requests", str(max(spec.batches))]
        flags += ["--cuda-graph-bs-decode", *map(str, spec.batches), *spec.flags]
        env = {"OMP_NUM_THREADS": "4"} | gpu_environment()
        (target, draft), loaded = self._pair, ["step_clock"]
        if spec.c2t:
            loaded.append("c2t")
            flags += ["--c2t", "--c2t-loopback-control"]
        if spec.shape:
            target, draft = models.write(spec.shape, self._work / "models", self._pair)
            loaded.append("graft")
            env |= graft.to_env(self._pair)
            flags += ["--load-format", "dummy"]
        if spec.drafts:
            flags += speculative_flags("EAGLE3", *spec.drafts, draft=draft)
        if attempt:
            flags += spec.fallbacks[attempt - 1]
        env |= plugins.environment(loaded)
        return Launch(spec.name, flags, target, common=()).argv(port), environment(env)

    def check(self) -> None:
        """Note which servers are ready and which died, and restart those that died."""
        for running in list(self.running.values()):
            if running.ready or running.dead:
                continue
            log = running.server.log.read_text(errors="replace")
            if READY in log:
                running.ready = True
                lines = [s[-400:] for s in log.splitlines() if any(w in s for w in TELLING)]
                seconds = round(elapsed() - running.began, 1)
                self._results.add("start", **running.facts, seconds=seconds, log=lines[-40:])
            elif running.server.process.poll() is not None:
                running.dead = True
                self._restart(running, log[-8000:])

    def _restart(self, running: Running, tail: str) -> None:
        """Start with fewer requests after an out-of-memory error, else with the next fallback."""
        spec = running.spec
        _kill_group(running.server.process.pid)  # a scheduler that outlives it holds GPU memory
        memory = any(text in tail.lower() for text in OUT_OF_MEMORY)
        cause = "out of memory" if memory else f"exit code {running.server.process.poll()}"
        self._results.add("died", **running.facts, cause=cause, log=tail[-4000:])
        fewer = spec.with_fewer_requests() if memory else None
        if fewer:
            self.start(fewer, running.attempt)
        elif running.attempt < len(spec.fallbacks):
            self.start(spec, running.attempt + 1)

    def wait(self, names: Sequence[str], until: float) -> list[str]:
        """Names of those that are alive once none of them is starting, or ``until`` that second."""
        while True:
            self.check()
            mine = [self.running[name] for name in names if name in self.running]
            if elapsed() >= until or all(running.ready or running.dead for running in mine):
                return [running.spec.name for running in mine if running.alive]
            time.sleep(0.3)

    def stop(self, *names: str) -> None:
        """Kill servers at once, because the next ones need their memory."""
        stopped = [self.running.pop(name) for name in names if name in self.running]
        for running in stopped:
            _kill_group(running.server.process.pid)
        for running in stopped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.server.process.wait(timeout=10)

    def logs(self, size: int = 150_000) -> str:
        """The last ``size`` bytes of every log."""
        tails = [path.read_bytes()[-size:].decode(errors="replace") for path in self._logs]
        return "".join(
            f"==== {path.stem}\n{t}\n" for path, t in zip(self._logs, tails, strict=True)
        )


def end_leftovers() -> None:
    """Kill servers of an earlier call that was killed itself."""
    started = _started()
    for pid in started.read_text().split() if started.exists() else []:
        with contextlib.suppress(OSError):
            if b"sglang" in Path(f"/proc/{pid}/cmdline").read_bytes():
                _kill_group(int(pid))
    started.unlink(missing_ok=True)


def _started() -> Path:
    return Path(tempfile.gettempdir()) / STARTED


def run_bounded(argv: Sequence[str], seconds: float, log: Path) -> int:
    """Run a command, output appended to ``log``; its exit code, 124 after ``seconds``."""
    with log.open("a") as sink:
        process = subprocess.Popen(
            argv, stdout=sink, stderr=subprocess.STDOUT, cwd=plugins.ROOT, start_new_session=True
        )
        try:
            return process.wait(timeout=max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            return 124
        finally:
            _kill_group(process.pid)
            process.wait()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)

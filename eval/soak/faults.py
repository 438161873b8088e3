"""What is done to a serving server: pauses, flushes, switches, lost files, dead children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from eval.server import Server
from eval.soak.verdicts import Interruptions

#: Longest that a server whose child died may take to end.
END_SECONDS = 30.0
JUNK = b"this is no classifier"

POLICIES = {
    "chain": ("c2t", "c2t-log", "c2t-plus", "dyjoint", "dymax", "fixed"),
    "tree": ("c2t", "c2t-log", "c2t-plus", "dyjoint", "eagle2", "c2t-eagle2"),
}


@dataclass(frozen=True)
class ClassifierFile:
    """A copy of the shipped classifier that a test may lose; the card lies beside it."""

    path: Path

    @classmethod
    def copied(cls, folder: Path, name: str) -> ClassifierFile:
        """The shipped classifier ``name`` in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        shipped = Path(str(files("sglang_c2t") / "classifier" / "default"))
        for suffix in (".safetensors", ".json"):
            shutil.copyfile(shipped / f"{name}{suffix}", folder / f"classifier{suffix}")
        return cls(folder / "classifier.safetensors")

    def lost(self) -> AbstractContextManager[None]:
        """Nobody finds it, and its card neither."""
        return self._harmed(Path.unlink)

    def corrupt(self) -> AbstractContextManager[None]:
        """Overwritten where it lies, so that a server that mapped it into memory would see it."""
        return self._harmed(lambda path: path.write_bytes(JUNK))

    @contextlib.contextmanager
    def _harmed(self, harm: Callable[[Path], object]) -> Iterator[None]:
        whole = {path: path.read_bytes() for path in (self.path, self.path.with_suffix(".json"))}
        for path in whole:
            harm(path)
        try:
            yield
        finally:
            for path, content in whole.items():
                path.write_bytes(content)


Act = Callable[[], Coroutine[Any, Any, None]]


@dataclass
class Meddler:
    """Does one thing after the other to a server under load, and counts what it was answered."""

    session: aiohttp.ClientSession
    url: str
    shape: str
    classifier: ClassifierFile
    interruptions: Interruptions
    rng: random.Random
    controllable: bool  # whether /c2t is there
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # (what, answer)
    unexpected: list[str] = field(default_factory=list)

    async def run(self, until: float, pause: tuple[float, float] = (0.4, 1.6)) -> None:
        """Act until ``until`` on the monotonic clock; every act once before any comes again."""
        acts: list[Act] = []
        while time.monotonic() < until:
            if not acts:
                acts = self._acts()
                self.rng.shuffle(acts)
            await acts.pop()()
            await asyncio.sleep(self.rng.uniform(*pause))

    def _acts(self) -> list[Act]:
        acts: list[Act] = [
            self.flush, self.flush_when_idle, self.pause_in_place, self.pause_and_retract,
            self.pause_and_abort, self.abort_all, self.look,
        ]  # fmt: skip
        if self.controllable:
            acts += 3 * [self.switch]
            acts += [self.refused_switches, self.harm_classifier]
        return acts

    async def flush(self) -> None:
        """A busy server refuses."""
        await self._post("flush", "/flush_cache", allowed=(200, 400))

    async def flush_when_idle(self) -> None:
        """It waits, and gives up if the server is never idle."""
        await self._post("flush with a timeout", "/flush_cache?timeout=1", allowed=(200, 400))

    async def pause_in_place(self) -> None:
        async with self._paused("in_place"):
            await asyncio.sleep(0.3)

    async def pause_and_retract(self) -> None:
        """All requests go back to the queue, so that the cache can be flushed."""
        async with self._paused("retract"):
            await self._post("flush while paused", "/flush_cache", allowed=(200, 400))

    async def pause_and_abort(self) -> None:
        with self._interrupting():
            async with self._paused("abort"):
                await asyncio.sleep(0.1)

    async def abort_all(self) -> None:
        with self._interrupting():
            await self._post("abort all", "/abort_request", {"abort_all": True})
            await asyncio.sleep(0.3)  # the scheduler gets to it at its next step

    async def look(self) -> None:
        """What a monitoring system reads."""
        for path in ("/metrics", "/server_info", "/v1/loads", "/model_info", "/health"):
            async with self.session.get(self.url + path) as response:
                self._note(f"GET {path}", response.status, (200,))

    async def switch(self) -> None:
        """Another policy or threshold."""
        body: dict[str, Any] = {"policy": self.rng.choice(POLICIES[self.shape])}
        if body["policy"] not in ("fixed", "eagle2"):
            body["beta"] = self.rng.choice((None, 0.05, 0.5, 0.9))
        await self._post("switch policy", "/c2t", body)

    async def refused_switches(self) -> None:
        bodies: tuple[Any, ...] = (
            {"beta": 7}, {"beta": "high"}, {"policy": "nobody"}, {"colour": 1}, {}, [],
            {"policy": "c2t", "classifier": "/nowhere"},
        )  # fmt: skip
        for body in bodies:
            await self._post("switch that must be refused", "/c2t", body, allowed=(400,))

    async def harm_classifier(self) -> None:
        """Serving goes on with what was loaded; a file that is gone cannot be loaded again."""
        body = {"policy": "c2t", "classifier": str(self.classifier.path)}
        for harmed in (self.classifier.lost(), self.classifier.corrupt()):
            with harmed:
                await self._post("reload a classifier that is gone", "/c2t", body, allowed=(400,))
            await self._post("reload classifier", "/c2t", body)

    @contextlib.asynccontextmanager
    async def _paused(self, mode: str) -> AsyncIterator[None]:
        await self._post(f"pause: {mode}", "/pause_generation", {"mode": mode})
        try:
            yield
        finally:
            await self._post("continue", "/continue_generation", {})

    @contextlib.contextmanager
    def _interrupting(self) -> Iterator[None]:
        spans, start = self.interruptions.spans, time.monotonic()
        spans.append((start, float("inf")))
        try:
            yield
        finally:
            spans[spans.index((start, float("inf")))] = (start, time.monotonic())

    async def _post(
        self, what: str, path: str, body: Any = None, allowed: tuple[int, ...] = (200,)
    ) -> None:
        async with self.session.post(self.url + path, json={} if body is None else body) as reply:
            self._note(what, reply.status, allowed, (await reply.text())[:200])

    def _note(self, what: str, status: int, allowed: tuple[int, ...], text: str = "") -> None:
        self.answers[what, str(status)] += 1
        if status not in allowed:
            self.unexpected.append(f"{what}: {status}, allowed {allowed}: {text}")


@dataclass(frozen=True)
class Ending:
    """How a server went down after one of its processes was killed."""

    killed: str
    seconds: float
    returncode: int | None  # None: it had to be stopped
    orphans: tuple[str, ...]  # processes of it that are still there
    port_free: bool

    @property
    def clean(self) -> bool:
        """Ended by itself, not as if all were well, and nothing is left."""
        return bool(self.returncode) and not self.orphans and self.port_free


def process_named(server: Server, title: str) -> psutil.Process:
    """The child with ``title`` in its command line: SGLang names its processes."""
    found = [p for p in server.processes()[1:] if title in " ".join(p.cmdline())]
    if len(found) != 1:
        told = [" ".join(p.cmdline())[:60] for p in server.processes()]
        raise LookupError(f"one child of the server must be named {title!r}, found: {told}")
    return found[0]


def kill_child(server: Server, title: str) -> Ending:
    """SIGKILL the child named ``title`` and watch the rest go down."""
    everyone = server.processes()
    start = time.monotonic()
    os.kill(process_named(server, title).pid, signal.SIGKILL)
    with contextlib.suppress(Exception):
        server.process.wait(timeout=END_SECONDS)
    _, left = psutil.wait_procs(everyone[1:], timeout=5)
    orphans = tuple(str(p.pid) for p in left if p.status() != psutil.STATUS_ZOMBIE)
    seconds = time.monotonic() - start
    return Ending(title, seconds, server.process.poll(), orphans, _port_is_free(server.url))


def _port_is_free(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.hostname, address.port))
        except OSError:
            return False
    return True

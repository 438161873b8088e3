"""Faults of a serving server: pauses, flushes, policy switches, lost files."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp

from eval.soak.clients import Interruptions

POLICIES = {
    "chain": ("c2t", "c2t-log", "c2t-plus", "dyjoint", "dymax", "fixed", "auto"),
    "tree": ("c2t", "c2t-log", "c2t-plus", "dyjoint", "eagle2", "c2t-eagle2", "auto"),
}


@dataclass(frozen=True)
class ClassifierFile:
    """A copy of the shipped classifier, with its card, that a test may harm."""

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
        """The file and its card are absent during the block."""
        return self._harmed(Path.unlink)

    def corrupt(self) -> AbstractContextManager[None]:
        """Both are overwritten in place, which a server that mapped the file would notice."""
        return self._harmed(lambda path: path.write_bytes(b"this is no classifier"))

    @contextlib.contextmanager
    def _harmed(self, harm: Callable[[Path], object]) -> Iterator[None]:
        before = {path: path.read_bytes() for path in (self.path, self.path.with_suffix(".json"))}
        for path in before:
            harm(path)
        try:
            yield
        finally:
            for path, content in before.items():
                path.write_bytes(content)


@dataclass
class Faults:
    """Causes one fault after the other under load, and counts the answers."""

    url: str
    shape: str
    classifier: ClassifierFile
    interruptions: Interruptions
    rng: random.Random
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # (fault, status)
    unexpected: list[str] = field(default_factory=list)

    async def run(self, session: aiohttp.ClientSession, until: float) -> None:
        """Cause faults until ``until`` on the monotonic clock, every one before any comes again."""
        deck: list[Any] = []
        while time.monotonic() < until:
            if not deck:
                deck = [self._flush, self._pause, self._abort_all, self._read,
                        self._harm_classifier, *3 * [self._switch]]  # fmt: skip
                self.rng.shuffle(deck)
            await deck.pop()(session)
            await asyncio.sleep(self.rng.uniform(0.4, 1.6))

    async def _flush(self, session: aiohttp.ClientSession) -> None:
        """A busy server refuses; with a timeout it waits first."""
        for path in ("/flush_cache", "/flush_cache?timeout=1"):
            await self._ask(session, "flush", path, {}, 200, 400)

    async def _pause(self, session: aiohttp.ClientSession) -> None:
        for mode in ("in_place", "retract", "abort"):
            aborting = self.interruptions.aborting() if mode == "abort" else None
            with aborting or contextlib.nullcontext():
                await self._ask(session, f"pause: {mode}", "/pause_generation", {"mode": mode})
                if mode == "retract":
                    await self._ask(session, "flush", "/flush_cache", {}, 200, 400)
                await asyncio.sleep(0.2)
                await self._ask(session, "continue", "/continue_generation", {})

    async def _abort_all(self, session: aiohttp.ClientSession) -> None:
        with self.interruptions.aborting():
            await self._ask(session, "abort all", "/abort_request", {"abort_all": True})
            await asyncio.sleep(0.3)  # the scheduler aborts them at its next step

    async def _read(self, session: aiohttp.ClientSession) -> None:
        """Read what a monitoring system reads."""
        for path in ("/metrics", "/server_info", "/v1/loads", "/model_info", "/health", "/c2t"):
            await self._ask(session, f"GET {path}", path, None)

    async def _switch(self, session: aiohttp.ClientSession) -> None:
        body: dict[str, Any] = {"policy": self.rng.choice(POLICIES[self.shape])}
        if body["policy"] not in ("fixed", "eagle2", "auto"):
            body["beta"] = self.rng.choice((None, 0.05, 0.5, 0.9))
        await self._ask(session, "switch policy", "/c2t", body)

    async def _harm_classifier(self, session: aiohttp.ClientSession) -> None:
        """A server serves on with the loaded classifier, and does not load a harmed file."""
        body = {"policy": "c2t", "classifier": str(self.classifier.path)}
        for harmed in (self.classifier.lost(), self.classifier.corrupt()):
            with harmed:
                await self._ask(session, "reload harmed classifier", "/c2t", body, 400)
            await self._ask(session, "reload classifier", "/c2t", body)

    async def _ask(
        self, session: aiohttp.ClientSession, fault: str, path: str, body: Any, *allowed: int
    ) -> None:
        """GET without a body, otherwise POST; allowed statuses default to 200."""
        method = "GET" if body is None else "POST"
        async with session.request(method, self.url + path, json=body) as reply:
            self.answers[fault, reply.status] += 1
            if reply.status not in (allowed or (200,)):
                self.unexpected.append(f"{fault}: {reply.status} {(await reply.text())[:200]}")

"""Which servers are compared: one without speculation, and one per draft kind and shape.

The demo models or the real pair on the CPU, or models of the user's own. Knows nothing of what is
sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import aiohttp
import requests

from eval.recordings import Pair
from eval.server import (
    DRAFTS,
    TARGET,
    Launch,
    Process,
    Server,
    ServerError,
    SwitchError,
    gpu_environment,
    running,
    speculative_flags,
    stop,
)

SHAPES = ("chains", "trees")

#: Prompts of a thousand tokens are prefilled in several chunks, on the demo models too.
CHUNKED = ("--chunked-prefill-size", "256")

#: On a GPU; other attention backends refuse float32, or round its products to TF32.
FLOAT32 = ("--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph")

T = TypeVar("T")


@dataclass(frozen=True)
class DraftSize:
    """How much is drafted; SGLang's own settings."""

    num_steps: int = 5
    topk: int = 4
    num_draft_tokens: int = 16


@dataclass(frozen=True)
class Models:
    """A target, its drafts by algorithm, and the flags that all their servers share."""

    target: str
    drafts: Mapping[str, str]
    flags: Sequence[str] = ()
    float32_flags: Sequence[str] = FLOAT32
    size: DraftSize = field(default_factory=DraftSize)
    demo: bool = False
    on_cpu: bool = False
    """Whether they are served as ours are: in float32 on the CPU."""

    alone: Mapping[str, str] = field(default_factory=dict)
    """Environment of the server without speculation, beside which no other runs."""

    @classmethod
    def of_the_demo(cls, flags: Sequence[str] = (), size: DraftSize | None = None) -> Models:
        """The demo target with its three drafts, in float32 on the CPU."""
        drafts = {algorithm: str(path) for algorithm, path in DRAFTS.items()}
        every = (*CHUNKED, *flags)
        exact = ("--dtype", "float32")
        return cls(str(TARGET), drafts, every, exact, size or DraftSize(), demo=True, on_cpu=True)

    @classmethod
    def of_the_pair(
        cls, pair: Pair, flags: Sequence[str] = (), size: DraftSize | None = None
    ) -> Models:
        """A real pair, likewise."""
        drafts = {pair.algorithm: str(pair.draft)}
        exact = ("--dtype", "float32")
        every = (*CHUNKED, *flags)
        size = size or DraftSize()
        return cls(str(pair.target), drafts, every, exact, size, on_cpu=True, alone=pair.env)

    def only(self, algorithms: Sequence[str]) -> Models:
        """The same with some of the drafts."""
        return replace(self, drafts={name: self.drafts[name] for name in algorithms})

    def kinds(self, shapes: Sequence[str]) -> list[tuple[str, str]]:
        """(algorithm, shape) of every ``--c2t`` server."""
        return [(algorithm, shape) for shape in shapes for algorithm in sorted(self.drafts)]

    def plain(self, name: str = "no speculation", *more: str) -> Launch:
        """Without speculation."""
        return self._launch(name, more, self.alone)

    def gated(
        self, algorithm: str, shape: str, *more: str, suffix: str = "", env: Mapping[str, str] = {}
    ) -> Launch:
        """With ``--c2t``; named after its kind."""
        flags = (*self._drafting(algorithm, shape), "--c2t", *more)
        return self._launch(f"{algorithm} {shape}{suffix}", flags, env)

    def stock(self, algorithm: str, shape: str) -> Launch:
        """With SGLang's own speculation of that kind, no ``--c2t``."""
        return self._launch(f"{algorithm} {shape}, stock", self._drafting(algorithm, shape))

    def _drafting(self, algorithm: str, shape: str) -> tuple[str, ...]:
        topk, nodes = (
            (self.size.topk, self.size.num_draft_tokens) if shape == "trees" else (1, None)
        )
        draft = self.drafts[algorithm]
        return speculative_flags(algorithm, self.size.num_steps, topk, nodes, draft=draft)

    def float32(self) -> Launch:
        """Without speculation, in float32: which token is likelier, but for rounding."""
        return self._launch("float32", self.float32_flags)

    def _launch(self, name: str, more: Sequence[str], env: Mapping[str, str] = {}) -> Launch:
        flags = (*self.flags, *more)
        if self.on_cpu:
            return Launch(name, flags, Path(self.target), env)
        cpu = {"SGLANG_USE_CPU_ENGINE": os.environ.get("SGLANG_USE_CPU_ENGINE", "0")}
        outer = {**gpu_environment(), **cpu, **env}
        return Launch(name, flags, Path(self.target), outer, common=())


#: What a server does that breaks: it dies, refuses, answers with an error or not in time.
BREAKS = (
    ServerError, SwitchError, aiohttp.ClientError, requests.RequestException, TimeoutError,
)  # fmt: skip


@dataclass(frozen=True)
class Broken:
    """What a server broke with, instead of a result."""

    server: str
    message: str


def visit_all(
    launches: Sequence[Launch],
    work: Callable[[Launch, Server], T],
    logs: Path,
    at_once: int = 1,
) -> list[T | Broken]:
    """Start each server, do ``work`` with it, stop it; results in the order of ``launches``.

    At most ``at_once`` servers live at a time. A server that breaks does not keep the others
    from being visited; any other error, an interruption too, ends them all.
    """
    live: set[Process] = set()

    def visit(launch: Launch) -> T | Broken:
        try:
            with running(launch, logs) as server:
                live.add(server.process)
                try:
                    return work(launch, server)
                finally:
                    live.discard(server.process)
        except BREAKS as error:
            return Broken(launch.name, f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(at_once) as pool:
        visits = [pool.submit(visit, launch) for launch in launches]
        try:
            return [visit.result() for visit in visits]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in live.copy():  # whoever waits for its answer stops waiting
                stop(process)
            raise

"""Servers of a losslessness run: one without speculation, one per draft model and shape."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import requests

from eval.server import Launch, Server, SwitchError, gpu_environment, running, speculative_flags
from sglang_c2t.offline.servers import Process, ServerError, stop

SHAPES = ("chains", "trees")
#: On the CPU; prompts of a thousand tokens are prefilled in several chunks.
CHUNKED = ("--chunked-prefill-size", "256")
#: On a GPU; other attention backends refuse float32 or round its products to TF32.
FLOAT32 = ("--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph")

T = TypeVar("T")


@dataclass(frozen=True)
class Models:
    """A target, its drafts by algorithm, and the flags of all their servers."""

    target: str
    drafts: Mapping[str, str]
    num_steps: int
    topk: int  # of trees
    num_draft_tokens: int  # of trees
    flags: Sequence[str] = ()
    float32_flags: Sequence[str] = FLOAT32
    on_cpu: bool = False  # in float32, as our own models are served
    alone: Mapping[str, str] = field(default_factory=dict)  # of a server beside which no other runs

    def kinds(self, shapes: Sequence[str]) -> list[tuple[str, str]]:
        """(algorithm, shape) of every ``--c2t`` server."""
        return [(algorithm, shape) for shape in shapes for algorithm in sorted(self.drafts)]

    def plain(self, name: str = "no speculation", *more: str) -> Launch:
        """A server without speculation."""
        return self._launch(name, more, self.alone)

    def speculative(
        self, algorithm: str, shape: str, *more: str, suffix: str = "", c2t: bool = True
    ) -> Launch:
        """A speculating server, ``--c2t`` unless it is SGLang's own speculation."""
        width = (self.topk, self.num_draft_tokens) if shape == "trees" else (1, None)
        draft = self.drafts[algorithm]
        drafting = speculative_flags(algorithm, self.num_steps, *width, draft=draft)
        flags = (*drafting, *(["--c2t"] if c2t else []), *more)
        return self._launch(f"{algorithm} {shape}{suffix}", flags)

    def float32(self) -> Launch:
        """A server without speculation that scores divergences in float32."""
        return self._launch("float32", self.float32_flags)

    def _launch(self, name: str, more: Sequence[str], env: Mapping[str, str] = {}) -> Launch:
        flags, target = (*self.flags, *more), Path(self.target)
        if self.on_cpu:
            return Launch(name, (*CHUNKED, *flags), target, env)
        cpu = {"SGLANG_USE_CPU_ENGINE": os.environ.get("SGLANG_USE_CPU_ENGINE", "0")}
        return Launch(name, flags, target, {**gpu_environment(), **cpu, **env}, common=())


#: Errors of a server that dies, refuses, fails a request or does not answer in time.
BREAKS = (ServerError, SwitchError, aiohttp.ClientError, requests.RequestException, TimeoutError)


@dataclass(frozen=True)
class Broken:
    """The error of a server that broke, instead of its result."""

    server: str
    message: str


def visit_all(
    works: Sequence[tuple[Launch, Callable[[Server], T]]], logs: Path, at_once: int = 1
) -> list[T | Broken]:
    """Start each server, work with it, stop it; results in order.

    A server that breaks does not keep the others from running; any other error ends them all.
    """
    live: set[Process] = set()
    unwanted = threading.Event()

    def visit(launch: Launch, work: Callable[[Server], T]) -> T | Broken:
        try:
            with running(launch, logs, unwanted) as server:
                live.add(server.process)
                try:
                    return work(server)
                finally:
                    live.discard(server.process)
        except BREAKS as error:
            return Broken(launch.name, f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(at_once) as pool:
        visits = [pool.submit(visit, *each) for each in works]
        try:
            return [visit.result() for visit in visits]
        except BaseException:
            unwanted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in live.copy():  # its thread stops waiting for an answer
                stop(process)
            raise

"""Send requests to a server with bounded concurrency, in order of arrival.

Times cover the whole batch: from the first request sent to the last answer read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    output_ids: tuple[int, ...]
    meta_info: dict[str, Any]


@dataclass(frozen=True)
class LoadResult:
    """Answers in the order of their prompts, and the wall time of the whole batch."""

    answers: list[Answer]
    seconds: float

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """Generated token ids in the order of the requests."""
        return [answer.output_ids for answer in self.answers]

    @property
    def output_tokens(self) -> int:
        """Tokens generated over all requests."""
        return sum(len(answer.output_ids) for answer in self.answers)


def differing(got: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> list[int]:
    """Numbers of the requests whose outputs differ; ValueError when one list is shorter."""
    return [i for i, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1]]


def greedy(text: str, max_new_tokens: int) -> dict[str, Any]:
    """A /generate body that decodes ``text`` at temperature 0."""
    return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}


def run_load(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    on_answer: Callable[[], None] = lambda: None,
) -> LoadResult:
    """POST every /generate body once, ``concurrency`` at a time; raises on the first failure."""
    return asyncio.run(_run(url, bodies, concurrency, on_answer))


async def _run(
    url: str,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    on_answer: Callable[[], None],
) -> LoadResult:
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(body: dict[str, Any]) -> Answer:
            async with gate, session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                reply = await response.json()
            on_answer()
            return Answer(tuple(reply["output_ids"]), reply["meta_info"])

        start = time.perf_counter()
        answers = await asyncio.gather(*(send(body) for body in bodies))
        return LoadResult(list(answers), time.perf_counter() - start)

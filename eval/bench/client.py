"""Sends the requests of one measured cell and keeps every answer; reads the plugin's metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson
import requests
from prometheus_client.parser import text_string_to_metric_families

from eval.bench.datasets import Sample
from eval.bench.records import Request

PREFIX = "c2t:"
"""Series that the plugin adds to ``/metrics``."""

READ_BYTES = 10 * 2**20  # a streamed line holds all token ids so far


@dataclass(frozen=True)
class Measured:
    """All answers of a cell, in the order of their prompts."""

    requests: list[Request]

    @property
    def duration_s(self) -> float:
        """Seconds from the first request sent to the last answer read."""
        return max(request.start_s + request.latency_s for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.output_len for request in self.requests)

    @property
    def busy_s(self) -> float:
        """Seconds with a request under way."""
        busy = end = 0.0
        for request in sorted(self.requests, key=lambda request: request.start_s):
            answered = request.start_s + request.latency_s
            busy += max(answered - max(end, request.start_s), 0.0)
            end = max(end, answered)
        return busy

    @property
    def failures(self) -> list[Request]:
        """Requests without a complete answer."""
        return [request for request in self.requests if not request.success]


def measure(
    url: str, samples: Sequence[Sample], concurrency: int, bodies: Sequence[dict[str, Any]],
    timeout_s: float, on_answer: Callable[[], None] = lambda: None,
    arrivals: Sequence[float] = (),
) -> Measured:  # fmt: skip
    """Send every sample once with its body, ``concurrency`` at a time, and keep the answers.

    With ``arrivals`` (seconds, ascending) each is sent at its time, the first at once.
    """

    async def send(session: aiohttp.ClientSession, gate: asyncio.Semaphore, i: int) -> Request:
        if arrivals:
            await asyncio.sleep(arrivals[i] - arrivals[0])
        async with gate:
            body = samples[i].body | bodies[i]
            found = await _ask(session, f"{url}/generate", body, i, samples[i])
        on_answer()
        return found

    async def send_all() -> list[Request]:
        gate = asyncio.Semaphore(len(samples) if arrivals else concurrency)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s), read_bufsize=READ_BYTES,
            connector=aiohttp.TCPConnector(limit=0),
        ) as session:  # fmt: skip
            return await asyncio.gather(*(send(session, gate, i) for i in range(len(samples))))

    found = asyncio.run(send_all())
    start = min(request.start_s for request in found)
    return Measured([replace(request, start_s=request.start_s - start) for request in found])


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], index: int, sample: Sample
) -> Request:
    """POST one request; ``start_s`` of the record is on the clock of ``time.perf_counter``."""
    start, ttft, error = time.perf_counter(), 0.0, ""
    ids: tuple[int, ...] = ()
    meta: dict[str, Any] = {}
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise ValueError(f"the server answered {response.status}: {text}")
            async for line in response.content:  # the answer so far, each time it grows
                data = line.strip().removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                answer = orjson.loads(data)
                if "error" in answer:
                    raise ValueError(str(answer["error"])[:300])
                ids, meta = tuple(answer["output_ids"]), answer["meta_info"]
                if not ttft and meta["completion_tokens"]:
                    ttft = time.perf_counter() - start
        reason = meta.get("finish_reason")
        if not reason:
            error = "the answer broke off"
        elif reason.get("type") == "abort":
            error = f"aborted: {reason.get('message', '')}"
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Request(
        index=index,
        family=sample.family,
        prompt_len=meta.get("prompt_tokens", sample.prompt_len),
        output_len=meta.get("completion_tokens", 0),
        output_ids=ids,
        start_s=start,
        latency_s=time.perf_counter() - start,
        ttft_s=ttft,
        success=not error,
        error=error,
        meta={k: v for k, v in meta.items()
              if k.startswith("spec_") or k in ("finish_reason", "cached_tokens")},
    )  # fmt: skip


# -- the server's metrics -------------------------------------------------------------------


def scrape(url: str) -> dict[str, float]:
    """The plugin's series on ``/metrics`` by name and labels; {} where there are none."""
    reply = requests.get(f"{url}/metrics/", timeout=30)
    reply.raise_for_status()
    return parse_series(reply.text)


def parse_series(text: str) -> dict[str, float]:
    """The plugin's series in Prometheus' text format, without times of creation."""
    return {
        f"{sample.name}{{{','.join(f'{k}={v!r}' for k, v in sorted(sample.labels.items()))}}}": (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    }


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The growth of each number."""
    return {key: value - before.get(key, 0) for key, value in after.items()}

"""Sends requests to a server with bounded concurrency, in order of arrival. Times cover the whole
batch: from the first request sent to the last answer read.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

#: Most seconds of a request, or of a streamed one between two of its tokens.
REQUEST_SECONDS = 600.0

#: Most seconds between two looks at a clock that may stand still.
POLL_SECONDS = 0.02

#: Variable with the server's key; unlike a flag it is in no process list or shell history.
API_KEY_ENV = "SGLANG_API_KEY"


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


@dataclass(frozen=True)
class Streamed:
    """One request whose tokens were streamed, by the client's clock."""

    text: str
    tokens: int
    began: float
    """When it was sent."""
    first_seconds: float
    """From sending it to its first token."""
    seconds: float
    """From sending it to its last token."""
    meta_info: dict[str, Any]

    @property
    def token_seconds(self) -> float:
        """Mean time between two tokens."""
        return (self.seconds - self.first_seconds) / max(self.tokens - 1, 1)


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
    requests = [("/generate", body) for body in bodies]
    replies, seconds = post_all(url, requests, concurrency=concurrency, on_answer=on_answer)
    return LoadResult([Answer(tuple(r["output_ids"]), r["meta_info"]) for r in replies], seconds)


def post_all(
    url: str,
    requests: Sequence[tuple[str, dict[str, Any]]],
    *,
    concurrency: int,
    on_answer: Callable[[], None] = lambda: None,
    api_key: str | None = None,
) -> tuple[list[dict[str, Any]], float]:
    """POST every (path, body) once; the replies in order, and seconds for all of them."""
    gate = asyncio.Semaphore(concurrency)

    async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
        async with gate, session.post(f"{url}{path}", json=body) as response:
            if response.status >= 400:
                reason = (await response.text())[:300]
                raise aiohttp.ClientError(f"{path} answered {response.status}: {reason}")
            reply = await response.json()
        on_answer()
        return reply

    async def post_them() -> tuple[list[dict[str, Any]], float]:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            connector=aiohttp.TCPConnector(limit=concurrency),
            headers=authorization(api_key),
        ) as session:
            start = time.perf_counter()
            replies = await asyncio.gather(*(post(session, *request) for request in requests))
            return list(replies), time.perf_counter() - start

    return asyncio.run(post_them())


def stream_all(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    *,
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
    arrivals: Sequence[float] = (),
) -> list[Streamed]:
    """Stream every /generate body once, ``concurrency`` at a time; the answers in order, with times
    in seconds of the ``clock``. With ``arrivals``, which increase, each is sent so many seconds
    after the call. Raises on the first failure.
    """
    gate = asyncio.Semaphore(concurrency)

    async def stream(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Streamed:
        async with gate:
            began, first, text, meta = clock(), 0.0, "", {}
            asked = {**body, "stream": True}
            async with session.post(f"{url}/generate", json=asked) as response:
                if response.status >= 400:
                    reason = (await response.text())[:300]
                    raise aiohttp.ClientError(f"/generate answered {response.status}: {reason}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[len(b"data: ") :])
                    first = first or clock() - began
                    # A server that streams increments sends what is new only.
                    more = chunk["text"]
                    text = more if more.startswith(text) else text + more
                    meta = chunk["meta_info"]
            tokens, seconds = int(meta.get("completion_tokens", 0)), clock() - began
            return Streamed(text, tokens, began, first, seconds, meta)

    async def stream_them() -> list[Streamed]:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_read=REQUEST_SECONDS),
            # A stopped server closes idle connections once it runs again.
            connector=aiohttp.TCPConnector(limit=concurrency, force_close=True),
            read_bufsize=1 << 20,
        ) as session:
            start, sent = clock(), []
            async with asyncio.TaskGroup() as group:  # the first failure ends the others
                for body, arrival in zip(bodies, arrivals or [0.0] * len(bodies), strict=True):
                    while (left := start + arrival - clock()) > 0.0:
                        await asyncio.sleep(min(left, POLL_SECONDS))  # the clock may stand still
                    sent.append(group.create_task(stream(session, body)))
            return [task.result() for task in sent]

    try:
        return asyncio.run(stream_them())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed


def full_load_rate(spans: Iterable[tuple[float, float, float, int]], load: int) -> float:
    """Return the tokens per second while ``load`` requests run, from the first one sent until one
    ends with none left to take its place. What follows depends on how equally long the answers are,
    and makes speculation look worse than a lasting load would.

    Args:
        spans: Of each request: when it was sent, when its first token and its last one came, and
            its number of tokens, which are spread evenly over that time.
        load: Requests at once.
    """
    began, first, ended, tokens = np.array(list(spans), dtype=np.float64).T
    until = np.sort(ended)[max(len(ended) - load, 0)]
    share = np.where(ended <= until, 1.0, (until - first) / np.maximum(ended - first, 1e-9))
    return float((tokens * share.clip(0.0, 1.0)).sum() / (until - began.min()))


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header for SGLang's ``--api-key``; none without a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def key_wanted(url: str, api_key: str | None) -> str:
    """The error message for a missing or wrong key."""
    return (
        f"the server at {url} wants {'another' if api_key else 'its'} key: set {API_KEY_ENV} to "
        "what its --api-key says, or add --api-key"
    )


def c2t_states(url: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """The plugin's report in /server_info for each scheduler; {} if there is none."""
    asked = urllib.request.Request(f"{url}/server_info", headers=authorization(api_key))
    with urllib.request.urlopen(asked, timeout=30) as response:
        info = json.load(response)
    return [state.get("c2t", {}) for state in info["internal_states"]]

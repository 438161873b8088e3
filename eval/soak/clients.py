"""Concurrent clients of a soak: they send jobs and malformed requests, and judge each reply."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp

from eval.soak.malformed import Malformed
from eval.soak.pool import Job, Outputs, begins, outputs_of, same

#: "cut": interrupted, and right until then; "served": malformed, but so does a stock server.
Verdict = Literal["right", "cut", "refused", "served", "wrong", "unexpected"]
BAD: tuple[Verdict, ...] = ("wrong", "unexpected")

#: A longer wait is a hang.
PATIENCE_SECONDS = 120.0
#: Seconds until a request that is to be aborted or abandoned ends.
SHORT_LIVES = (0.02, 1.5)
AT_ONCE = 24


@dataclass(frozen=True)
class Reply:
    """A server's answer; times are seconds of one monotonic clock."""

    status: int  # of HTTP, or of the error in a stream; 0 without an answer
    started: float
    ended: float
    outputs: Outputs = ()
    disconnected: bool = False  # by the client, on purpose
    problem: str = ""


@dataclass(frozen=True)
class Outcome:
    """One request and its verdict."""

    kind: str
    name: str  # of a malformed request, or the key of the job
    verdict: Verdict
    status: int
    seconds: float
    detail: str = ""


@dataclass
class Interruptions:
    """When the server aborted all requests, and how long it lets one run."""

    time_limit: float  # seconds
    spans: list[tuple[float, float]] = field(default_factory=list)

    def may_have_ended(self, reply: Reply) -> bool:
        """Whether the server may have aborted this request."""
        return reply.ended - reply.started >= self.time_limit or any(
            start <= reply.ended and reply.started <= end for start, end in self.spans
        )

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """All requests may be aborted during the block."""
        index = len(self.spans)
        self.spans.append((time.monotonic(), float("inf")))
        yield
        self.spans[index] = (self.spans[index][0], time.monotonic())


def judge(
    job: Job, reply: Reply, expected: Outputs | None, interruptions: Interruptions
) -> Verdict:
    """Verdict on a well-formed request; ``expected`` is ``None`` for a sampled one."""
    if expected is not None and not begins(reply.outputs, expected):
        return "wrong"
    if reply.disconnected:
        return "cut"
    if reply.status == 200 and all(o.finish in ("stop", "length") for o in reply.outputs):
        equal = bool(reply.outputs) if expected is None else same(reply.outputs, expected)
        return "right" if equal else "wrong"
    interrupted = job.end == "abort" or interruptions.may_have_ended(reply)
    return "cut" if interrupted and reply.status in (200, 400, 503) else "unexpected"


def judge_malformed(reply: Reply, may_be_served: bool, interruptions: Interruptions) -> Verdict:
    """Verdict on a malformed request: a 4xx, or an answer if it may be served."""
    if 400 <= reply.status < 500:
        return "refused"
    if 200 <= reply.status < 300 and may_be_served:
        return "served"
    aborted = "abort" in reply.problem.lower() or reply.status == 503
    return "cut" if aborted and interruptions.may_have_ended(reply) else "unexpected"


# -- one request ----------------------------------------------------------------------------


def connect() -> aiohttp.ClientSession:
    """A session that uses no connection twice: a server may close one without notice."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def send(session: aiohttp.ClientSession, url: str, job: Job, rid: str, delay: float) -> Reply:
    """Send ``job``; abort it or disconnect after ``delay`` seconds if its end says so."""
    answer: Any = None  # of a stream the last chunk, which repeats the others
    started, status, problem = time.monotonic(), 0, ""
    abort = asyncio.create_task(_abort(session, url, rid, delay)) if job.end == "abort" else None
    disconnected = False
    try:
        async with asyncio.timeout(delay if job.end == "disconnect" else PATIENCE_SECONDS):
            body = {**job.body, "rid": rid, "stream": job.stream}
            async with session.post(f"{url}/generate", json=body) as response:
                status = response.status
                if status != 200:
                    problem = (await response.text())[:300]
                elif not job.stream:
                    answer = await response.json()
                else:
                    async for chunk in _events(response):
                        if "error" in chunk:
                            status = int(chunk["error"].get("code") or 500)
                            problem = str(chunk["error"].get("message"))[:300]
                        else:
                            answer = chunk
    except TimeoutError:
        disconnected = job.end == "disconnect"
        status, problem = 0, "" if disconnected else "no answer"
    except aiohttp.ClientError as error:
        status, problem = 0, repr(error)[:300]
    ended = time.monotonic()
    if abort is not None:
        await abort
    outputs = () if answer is None else outputs_of(answer)
    return Reply(status, started, ended, outputs, disconnected, problem)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """JSON objects of a stream of server-sent events."""
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


async def _abort(session: aiohttp.ClientSession, url: str, rid: str, delay: float) -> None:
    await asyncio.sleep(delay)
    with contextlib.suppress(aiohttp.ClientError):  # it shows in the request not aborted
        await session.post(f"{url}/abort_request", json={"rid": rid})


async def send_malformed(session: aiohttp.ClientSession, url: str, case: Malformed) -> Reply:
    """Send it as it is."""
    started, status, problem = time.monotonic(), 0, "no answer"
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            session.request(
                case.method, url + case.path, data=case.raw, headers=case.headers
            ) as reply,
        ):
            status, problem = reply.status, (await reply.text())[:300]
    return Reply(status, started, time.monotonic(), problem=problem)


# -- many requests --------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Answers of a server without speculation, by key, and malformed requests that it served."""

    outputs: Mapping[str, Outputs]
    served: frozenset[str] = frozenset()


async def ask_reference(
    url: str, jobs: Sequence[Job], malformed: Sequence[Malformed], advance: Callable[[], None]
) -> Reference:
    """Ask the server at ``url`` everything once; RuntimeError if it fails a job."""
    gate, outputs, served = asyncio.Semaphore(4), dict[str, Outputs](), set[str]()

    async def ask(session: aiohttp.ClientSession, card: Job | Malformed) -> None:
        async with gate:
            if isinstance(card, Malformed):
                if 200 <= (await send_malformed(session, url, card)).status < 300:
                    served.add(card.name)
            else:
                answered = replace(card, end="answer")
                reply = await send(session, url, answered, f"reference-{card.key}", 0)
                if reply.status != 200:
                    raise RuntimeError(f"the reference failed {card.kind}: {reply}")
                outputs[card.key] = reply.outputs
        advance()

    async with connect() as session:
        cards: list[Job | Malformed] = [job for job in jobs if job.key]
        await asyncio.gather(*(ask(session, card) for card in [*cards, *malformed]))
    return Reference(outputs, frozenset(served))


@dataclass
class Clients:
    """Clients that draw from one shuffled deck, so that every kind of request comes in turn."""

    url: str
    jobs: Sequence[Job]
    malformed: Sequence[Malformed]
    reference: Reference
    interruptions: Interruptions
    rng: random.Random
    outcomes: list[Outcome] = field(default_factory=list)
    decks: int = 0  # shuffled so far
    _deck: list[Job | Malformed] = field(default_factory=list)
    _sent: int = 0

    async def run(self, session: aiohttp.ClientSession, until: float) -> None:
        """Send until ``until`` on the monotonic clock; return when the last reply is in."""

        async def client() -> None:
            while time.monotonic() < until:
                await self._serve(session, self._draw())

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    async def run_once(self) -> None:
        """Send every deterministic job once, to its end."""
        self._deck = [replace(job, end="answer") for job in self.jobs if job.key]

        async def client(session: aiohttp.ClientSession) -> None:
            while self._deck:
                await self._serve(session, self._deck.pop())

        async with connect() as session:
            await asyncio.gather(*(client(session) for _ in range(4)))

    def _draw(self) -> Job | Malformed:
        if not self._deck:
            self._deck = [*self.jobs, *self.jobs, *self.malformed]
            self.rng.shuffle(self._deck)
            self.decks += 1
        return self._deck.pop()

    async def _serve(self, session: aiohttp.ClientSession, card: Job | Malformed) -> None:
        self._sent += 1
        if isinstance(card, Malformed):
            kind, name = "malformed", card.name
            reply = await send_malformed(session, self.url, card)
            served = name in self.reference.served
            verdict = judge_malformed(reply, served, self.interruptions)
        else:
            kind, name = card.kind, card.key
            # Ids of one length: SGLang aborts every request whose id begins with the given one.
            delay = self.rng.uniform(*SHORT_LIVES)
            reply = await send(session, self.url, card, f"soak-{self._sent:07}", delay)
            verdict = judge(card, reply, self.reference.outputs.get(name), self.interruptions)
        seconds = round(reply.ended - reply.started, 4)
        detail = f"{reply.problem} {reply.outputs}"[:600] if verdict in BAD else ""
        self.outcomes.append(Outcome(kind, name, verdict, reply.status, seconds, detail))

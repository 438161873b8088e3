"""Traffic against one server for a while: many clients at once, every answer judged."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from eval.soak.faults import Meddler
from eval.soak.malformed import FATAL, Malformed
from eval.soak.sender import send, send_malformed
from eval.soak.traffic import Job, Outputs, difference
from eval.soak.verdicts import GOOD, Interruptions, Reply, Verdict, judge, judge_malformed

Card = Job | Malformed

#: How long a request that is to be ended early may live, seconds.
SHORT_LIVES = (0.02, 1.5)


@dataclass(frozen=True)
class Outcome:
    """One request and what became of it."""

    kind: str
    name: str  # of a malformed request, or the number of the expected outputs
    verdict: Verdict
    status: int
    seconds: float
    detail: str = ""  # of what should not have happened


@dataclass
class Answers:
    """What a server without speculation answered: outputs by key, statuses by name, None where it
    was not asked because it would have ended.
    """

    outputs: dict[str, Outputs] = field(default_factory=dict)
    statuses: dict[str, int | None] = field(
        default_factory=lambda: dict.fromkeys(case.name for case in FATAL)
    )


def connect() -> aiohttp.ClientSession:
    """Any number of connections, none used twice: a server closes some without a word."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def reference_answers(
    url: str, jobs: Sequence[Job], malformed: Sequence[Malformed], advance: Callable[[], None]
) -> Answers:
    """Ask a server without speculation everything once; RuntimeError where it fails a request
    that is well-formed.
    """
    answers, gate = Answers(), asyncio.Semaphore(4)

    async def ask(session: aiohttp.ClientSession, number: int, job: Job) -> None:
        async with gate:
            reply = await send(session, url, replace(job, end="answer"), f"reference-{number}", 0)
        if reply.status != 200:
            raise RuntimeError(f"the reference answered {job.kind}: {reply.status} {reply.problem}")
        answers.outputs[job.key] = reply.outputs
        advance()

    async with connect() as session:
        keyed = [job for job in jobs if job.key]
        await asyncio.gather(*(ask(session, i, job) for i, job in enumerate(keyed)))
        for case in malformed:
            answers.statuses[case.name] = (await send_malformed(session, url, case)).status
            advance()
    return answers


@dataclass
class Storm:
    """Clients that take requests from one shuffled deck, so that each kind comes up in turn."""

    url: str
    jobs: Sequence[Job]
    malformed: Sequence[Malformed]
    answers: Answers
    interruptions: Interruptions
    rng: random.Random
    max_requests: int
    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    _deck: list[Card] = field(default_factory=list)
    _decks: int = 0

    @property
    def spent(self) -> bool:
        """Whether the bound on requests is reached."""
        return self.sent >= self.max_requests

    @property
    def dealt(self) -> bool:
        """Whether a whole deck went out, so that each kind was sent."""
        return self._decks > 1 or (self._decks == 1 and not self._deck)

    async def blow(self, seconds: float, concurrency: int, meddler: Callable[
        [aiohttp.ClientSession], Meddler], tick: Callable[[], None]) -> Meddler:  # fmt: skip
        """Traffic and faults for ``seconds``; returns when the last answer is in."""
        until = time.monotonic() + seconds
        async with connect() as session:
            at_work = meddler(session)
            clients = (self._client(session, until, tick) for _ in range(concurrency))
            await asyncio.gather(at_work.run(until), *clients)
        return at_work

    async def once(self, concurrency: int) -> None:
        """Every deterministic request once more, whole, without faults."""
        gate = asyncio.Semaphore(concurrency)

        async def ask(session: aiohttp.ClientSession, job: Job) -> None:
            async with gate:
                await self._serve(session, job)

        async with connect() as session:
            whole = [replace(job, end="answer") for job in self.jobs if job.key]
            await asyncio.gather(*(ask(session, job) for job in whole))

    async def _client(
        self, session: aiohttp.ClientSession, until: float, tick: Callable[[], None]
    ) -> None:
        while time.monotonic() < until and not self.spent:
            await self._serve(session, self._draw())
            tick()

    def _draw(self) -> Card:
        if not self._deck:
            self._deck = [*self.jobs, *self.jobs, *self.malformed]
            self.rng.shuffle(self._deck)
            self._decks += 1
        return self._deck.pop()

    async def _serve(self, session: aiohttp.ClientSession, card: Card) -> None:
        self.sent += 1
        if isinstance(card, Malformed):
            reply = await send_malformed(session, self.url, card)
            stock = self.answers.statuses[card.name]
            verdict = judge_malformed(reply, stock, self.interruptions)
            self._record("malformed", card.name, verdict, reply)
            return
        # Of one length: SGLang aborts every request whose id begins with the one that is named or
        # timed out.
        rid = f"soak-{self.sent:07}"
        reply = await send(session, self.url, card, rid, self.rng.uniform(*SHORT_LIVES))
        expected = self.answers.outputs[card.key] if card.key else None
        verdict = judge(card, reply, expected, self.interruptions)
        told = ""
        if verdict == "wrong" and expected is not None:
            told = difference(reply.outputs, expected)
        self._record(card.kind, card.key, verdict, reply, told)

    def _record(self, kind: str, name: str, verdict: Verdict, reply: Reply, told: str = "") -> None:
        detail = "" if verdict in GOOD else told or "; ".join(reply.messages)
        self.outcomes.append(
            Outcome(kind, name, verdict, reply.status, round(reply.seconds, 4), detail)
        )


def counted(outcomes: Sequence[Outcome]) -> Mapping[str, dict[str, int]]:
    """Verdicts of each kind of request."""
    table: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        table[outcome.kind][outcome.verdict] += 1
    return table

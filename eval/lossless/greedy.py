"""Greedy equality: a ``--c2t`` server gives, token by token, what the plain server gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eval.lossless.diverge import Divergence, Output, compare
from eval.lossless.workload import Asked
from eval.metrics import SpecTotals
from eval.server import Server
from sglang_c2t.offline.client import post_all

#: Policies a running server is switched to, in turn.
POLICIES = {
    "chains": ("c2t", "c2t-plus", "dyjoint", "fixed", "auto"),
    "trees": ("c2t", "c2t-plus", "c2t-eagle2", "eagle2", "auto"),
}

#: At once, and the share of a policy's requests; the rest goes to the largest batch.
BATCHES = ((1, 0.05), (8, 0.15), (64, 1.0))

#: The batch of the reference.
REFERENCE_BATCH = 16


@dataclass(frozen=True)
class Wave:
    """Requests served in one batch size under one policy."""

    server: str
    policy: str
    concurrency: int
    requests: int
    tokens: int
    accept_length: float | None
    gamma: float | None
    divergences: list[Divergence] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        """How many of its requests parted so."""
        return sum(divergence.verdict == verdict for divergence in self.divergences)


@dataclass(frozen=True)
class Served:
    """What a server answered, and how it drafted meanwhile."""

    outputs: list[Output]
    totals: SpecTotals


def ask(
    server: Server, asked: Sequence[Asked], concurrency: int, on_answer: Callable[[], None]
) -> Served:
    """Send all of it from an empty cache."""
    server.flush_cache()
    posts = [("/generate", request.body) for request in asked]
    replies, _ = post_all(server.url, posts, concurrency=concurrency, on_answer=on_answer)
    totals = SpecTotals.from_meta_infos(reply["meta_info"] for reply in replies)
    return Served([Output.of(reply) for reply in replies], totals)


def wave(
    name: str, policy: str, concurrency: int, asked: Sequence[Asked],
    expected: Sequence[Output], served: Served,
) -> Wave:  # fmt: skip
    """Compare what was served with what was expected."""
    pairs = zip(asked, expected, served.outputs, strict=True)
    parted = [compare(request, wanted, got) for request, wanted, got in pairs]
    return Wave(
        server=name,
        policy=policy,
        concurrency=concurrency,
        requests=len(asked),
        tokens=sum(len(output.ids) for output in served.outputs),
        accept_length=served.totals.accept_length,
        gamma=served.totals.gamma,
        divergences=[divergence for divergence in parted if divergence is not None],
    )


def check(
    server: Server, name: str, policies: Sequence[str], asked: Sequence[Asked],
    expected: Sequence[Output], on_answer: Callable[[], None],
) -> list[Wave]:  # fmt: skip
    """All of ``asked`` on one ``--c2t`` server: dealt to the policies, then to the batch sizes."""
    waves = []
    for policy, mine in zip(policies, blocks(len(asked), len(policies)), strict=True):
        server.switch(policy=policy)
        waves += in_batches(server, name, policy, asked[mine], expected[mine], on_answer)
    return waves


def in_batches(
    server: Server, name: str, policy: str, asked: Sequence[Asked], expected: Sequence[Output],
    on_answer: Callable[[], None],
) -> list[Wave]:  # fmt: skip
    """All of ``asked`` on a server as it is, dealt to the batch sizes."""
    waves = []
    for concurrency, part in dealt(len(asked)):
        if some := asked[part]:
            served = ask(server, some, concurrency, on_answer)
            waves.append(wave(name, policy, concurrency, some, expected[part], served))
    return waves


def blocks(n: int, parts: int) -> list[slice]:
    """``n`` requests in ``parts`` stretches: neighbours stay together, as some share a prefix."""
    ends = [n * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def dealt(n: int) -> list[tuple[int, slice]]:
    """(at once, which of the ``n`` requests) of each wave, the largest batch last."""
    parts, start = [], 0
    for concurrency, share in BATCHES:
        end = n if share == 1.0 else start + round(share * n)
        parts.append((concurrency, slice(start, end)))
        start = end
    return parts

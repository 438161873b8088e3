"""Greedy equality: each answer of a server equals, token for token, that without speculation.

Matrix products round differently at other batch sizes, so that even a server without speculation
may choose another token where several are likeliest within rounding. Therefore the common prefix of
two different answers is scored in float32. The divergence is a tie if both tokens are the likeliest
one within the rounding noise of the served model, otherwise a defect. :func:`rounding_noise`
measures that noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from eval.lossless.workload import Request
from eval.metrics import SpecTotals
from eval.server import Server
from sglang_c2t.offline.client import post_all

#: Policies that a server is switched to in turn.
POLICIES = {
    "chains": ("c2t", "c2t-plus", "dyjoint", "fixed", "auto"),
    "trees": ("c2t", "c2t-plus", "c2t-eagle2", "eagle2", "auto"),
}
#: Concurrency, and the share of a policy's requests; the largest batch gets the rest.
BATCHES = ((1, 0.05), (8, 0.15), (64, 1.0))
REFERENCE_BATCH = 16

#: Times the largest measured noise: the largest of thousands of places is not the largest of all.
SAFETY = 2.0
#: Nats; answers diverge where the likeliest token leads by less.
NEAR_TIE = 1.0
#: Likeliest tokens that the float32 server returns at each place of a prompt.
CANDIDATES = 20

Advance = Callable[[], None]


@dataclass(frozen=True)
class Output:
    """Tokens, finish reason and text of one answer."""

    ids: tuple[int, ...]
    finish: tuple[str, Any] = ("length", None)
    text: str = ""

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Output:
        """From a /generate reply."""
        reason = reply["meta_info"]["finish_reason"] or {}
        finish = (str(reason.get("type")), reason.get("matched"))
        return cls(tuple(reply["output_ids"]), finish, reply.get("text", ""))


@dataclass
class Divergence:
    """One request whose answer differs from the expected one."""

    index: int
    kind: str
    concurrency: int
    place: int  # of the first token that differs, from 0
    prompt_ids: Sequence[int]
    prefix_ids: Sequence[int]  # equal tokens before that place
    expected: int | None  # None: the answer ended there
    got: int | None
    why: str = ""
    constrained: bool = False  # by a grammar
    lead: float | None = None  # nats in float32, of the likeliest token over the lesser of the two
    verdict: str = "unclassified"  # or "tie" or "defect"


@dataclass(frozen=True)
class Wave:
    """The requests that one server answered under one policy, at all batch sizes."""

    server: str
    policy: str
    requests: int
    tokens: int
    accept_length: float | None
    gamma: float | None
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def ties(self) -> int:
        """How many divergences are ties; the others are defects."""
        return sum(divergence.verdict == "tie" for divergence in self.divergences)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where token lists differ, ``None`` if they are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def compare(
    request: Request, expected: Output, got: Output, concurrency: int = 1
) -> Divergence | None:
    """How ``got`` differs, ``None`` if equal; a defect unless a tie could explain it."""
    if expected == got:
        return None
    place = first_difference(expected.ids, got.ids)
    at = len(expected.ids) if place is None else place
    wanted, other = (ids[at] if at < len(ids) else None for ids in (expected.ids, got.ids))
    why = ""
    if place is None:
        ends = f"ended by {got.finish}, not {expected.finish}"
        why = f"same tokens, but {'another text' if got.finish == expected.finish else ends}"
    elif wanted is None or other is None:
        why = "one answer just ends"
    return Divergence(
        request.index, request.kind, concurrency, at, request.body["input_ids"],
        expected.ids[:at], wanted, other, why, request.constrained,
        verdict="defect" if why else "unclassified",
    )  # fmt: skip


def blocks(n: int, parts: int) -> list[slice]:
    """``n`` requests in ``parts`` contiguous blocks, as neighbours may share a prefix."""
    return [slice(*ends) for ends in pairwise(n * part // parts for part in range(parts + 1))]


def by_batch_size(n: int) -> list[tuple[int, slice]]:
    """(concurrency, which of the ``n`` requests), the largest batch last."""
    parts, start = [], 0
    for concurrency, share in BATCHES:
        end = n if share == 1.0 else start + round(share * n)
        parts.append((concurrency, slice(start, end)))
        start = end
    return parts


def ask(
    server: Server, requests: Sequence[Request], concurrency: int, advance: Advance
) -> list[dict[str, Any]]:
    """Replies to all requests, from an empty cache."""
    server.flush_cache()
    posts = [("/generate", request.body) for request in requests]
    return post_all(server.url, posts, concurrency=concurrency, on_answer=advance)[0]


def wave(
    server: Server, name: str, policy: str, requests: Sequence[Request],
    expected: Sequence[Output], advance: Advance,
) -> Wave:  # fmt: skip
    """Send all requests at every batch size, and compare."""
    replies: list[dict[str, Any]] = []
    found: list[Divergence | None] = []
    for concurrency, part in by_batch_size(len(requests)):
        if some := requests[part]:
            got = ask(server, some, concurrency, advance)
            triples = zip(some, expected[part], map(Output.of, got), strict=True)
            found += [compare(*triple, concurrency) for triple in triples]
            replies += got
    totals = SpecTotals.from_meta_infos(reply["meta_info"] for reply in replies)
    tokens = sum(len(reply["output_ids"]) for reply in replies)
    divergences = [divergence for divergence in found if divergence is not None]
    return Wave(
        name, policy, len(replies), tokens, totals.accept_length, totals.gamma, divergences
    )  # fmt: skip


def check(
    server: Server, name: str, policies: Sequence[str], requests: Sequence[Request],
    expected: Sequence[Output], advance: Advance,
) -> list[Wave]:  # fmt: skip
    """One wave per policy, each with a block of the requests."""
    waves = []
    for policy, part in zip(policies, blocks(len(requests), len(policies)), strict=True):
        server.switch(policy=policy)
        waves.append(wave(server, name, policy, requests[part], expected[part], advance))
    return waves


# -- defect or tie --------------------------------------------------------------------------


def classify(url: str, divergences: Sequence[Divergence], noise: float) -> None:
    """Make each unclassified divergence a tie or a defect, by the float32 server at ``url``.

    A tie: the likeliest token leads over the lesser of the two by at most ``SAFETY`` times the
    noise. Where a grammar forbids tokens, the likelier of the two counts as the likeliest.
    """
    unclear = [d for d in divergences if d.verdict == "unclassified"]
    replies = logprobs(
        url, [[*d.prompt_ids, *d.prefix_ids] for d in unclear], max_new_tokens=1,
        more=[{"top_logprobs_num": 1, "token_ids_logprob": [d.expected, d.got]} for d in unclear],
    )  # fmt: skip
    for divergence, reply in zip(unclear, replies, strict=True):
        meta = reply["meta_info"]
        both = [value for value, _, _ in meta["output_token_ids_logprobs"][0]]
        best = max(both) if divergence.constrained else meta["output_top_logprobs"][0][0][0]
        divergence.lead = best - min(both)
        tie = divergence.lead <= SAFETY * noise
        divergence.verdict = "tie" if tie else "defect"
        divergence.why = (
            f"in float32 the likeliest token leads by {divergence.lead:.2e} nats, "
            f"{'within' if tie else 'beyond'} rounding ({SAFETY * noise:.2e})"
        )


def served_answers(url: str, prompts: Sequence[Sequence[int]], length: int = 64) -> list[Any]:
    """(prompt, greedy reply with the two best tokens of each place), for :func:`rounding_noise`."""
    more = [{"top_logprobs_num": 2}] * len(prompts)
    replies = logprobs(url, prompts, length, more, concurrency=16, ignore_eos=True)
    return list(zip(prompts, replies, strict=True))


def rounding_noise(url: str, served: Sequence[Any]) -> float:
    """Nats by which a lead of the ``served`` answers differs at most from the float32 server's.

    A lead is the difference of the log-probabilities of the two best tokens at a place. Places with
    a lead below ``NEAR_TIE`` count, as answers diverge there; all places if there is none.
    """
    read = [[*prompt, *reply["output_ids"]] for prompt, reply in served]
    more = [{"logprob_start_len": 0, "top_logprobs_num": CANDIDATES}] * len(read)
    errors: list[tuple[float, float]] = []  # (served lead, its error)
    for (prompt, answer), reply in zip(served, logprobs(url, read, 0, more), strict=True):
        exact = reply["meta_info"]["input_top_logprobs"][len(prompt) :]
        places = answer["meta_info"]["output_top_logprobs"]
        for ((one, first, _), (other, second, _)), place in zip(places, exact, strict=True):
            known = {token: value for value, token, _ in place}
            if first in known and second in known:
                lead = one - other
                errors.append((lead, abs(lead - (known[first] - known[second]))))
    if not errors:
        raise ValueError("the served answers are empty, so no rounding can be measured on them")
    return max([error for lead, error in errors if lead < NEAR_TIE] or [e for _, e in errors])


def logprobs(
    url: str, prompts: Sequence[Sequence[int]], max_new_tokens: int,
    more: Sequence[dict[str, Any]], concurrency: int = 4, **params: Any,
) -> list[Any]:  # fmt: skip
    """Greedy replies with log-probabilities; ``more`` fields for each prompt."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, **params}
    common = {"sampling_params": params, "return_logprob": True}
    posts = [
        ("/generate", {**common, "input_ids": list(prompt), **fields})
        for prompt, fields in zip(prompts, more, strict=True)
    ]
    return post_all(url, posts, concurrency=concurrency)[0]

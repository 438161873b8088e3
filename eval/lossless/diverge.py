"""Where two greedy answers part, and whether that is a defect or a floating-point tie.

Matrix products round differently for other batch shapes, so that even a server without
speculation need not repeat itself at another batch size. An honest server parts from it only
where several tokens are likeliest within rounding; a faulty one anywhere. Therefore the common
prefix is scored again in float32: it is a tie if both tokens are the likeliest one but for at
most the rounding noise of the served model, a defect otherwise.

The noise is not assumed but measured, as :func:`rounding_noise` tells. Behind a divergence the
contexts differ, and nothing can be compared.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eval.lossless.workload import Asked
from sglang_c2t.offline.client import post_all

#: Of the noise measured: the largest of thousands of places is not the largest there is.
SAFETY = 2.0

#: Places where the likeliest token leads by less are those at which answers can part.
NEAR_TIE = 1.0  # nats


@dataclass(frozen=True)
class Output:
    """What a server answered: tokens, why it ended there, the text."""

    ids: tuple[int, ...]
    finish: tuple[str, Any] = ("length", None)
    text: str = ""

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Output:
        """From a /generate reply."""
        reason = reply["meta_info"]["finish_reason"] or {}
        finish = (str(reason.get("type")), reason.get("matched"))
        return cls(tuple(reply["output_ids"]), finish, reply.get("text", ""))


@dataclass(frozen=True)
class Score:
    """A context's next token in float32: natural log-probabilities."""

    best: float  # of the likeliest token
    wanted: float
    got: float


@dataclass(frozen=True)
class Noise:
    """How far the served model's lead of one token over another is from float32's, in nats."""

    largest: float
    median: float
    places: int

    @property
    def bound(self) -> float:
        """Smaller leads than this decide nothing."""
        return SAFETY * self.largest


@dataclass(frozen=True)
class Divergence:
    """One request whose answer is not the expected one."""

    index: int
    sort: str
    place: int  # of the first token that differs, from 0
    prompt_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]  # generated alike, before that place
    wanted: int | None  # None: ended there
    got: int | None
    why: str = ""
    constrained: bool = False  # by a grammar
    lead: float | None = None  # nats in float32, of the likeliest token over the lesser of the two
    bound: float | None = None
    verdict: str = "unclassified"  # or "tie" or "defect"

    @property
    def context(self) -> list[int]:
        """What the differing token follows."""
        return [*self.prompt_ids, *self.prefix_ids]


def parting(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """The first place where the answers differ, ``None`` where they do not."""
    for place, (one, other) in enumerate(zip(wanted, got, strict=False)):
        if one != other:
            return place
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


def compare(asked: Asked, wanted: Output, got: Output) -> Divergence | None:
    """How ``got`` differs from ``wanted``, if it does; not yet classified unless that is clear."""
    place = parting(wanted.ids, got.ids)
    if place is None and (wanted.finish, wanted.text) == (got.finish, got.text):
        return None
    at = len(wanted.ids) if place is None else place
    one, other = (ids[at] if at < len(ids) else None for ids in (wanted.ids, got.ids))
    clear = one is None or other is None
    if place is None:
        why = f"same tokens, but ended by {got.finish}, not {wanted.finish}"
        why = why if got.finish != wanted.finish else "same tokens, but another text"
    else:
        why = "one answer just ends" if clear else ""
    return Divergence(
        asked.index, asked.sort, at, tuple(asked.prompt_ids), tuple(wanted.ids[:at]), one, other,
        why=why, constrained=asked.constrained, verdict="defect" if clear else "unclassified",
    )  # fmt: skip


def classify(
    found: Sequence[Divergence], scores: Sequence[Score], noise: Noise
) -> list[Divergence]:
    """The divergences, each called a tie or a defect; ``scores`` belong to the unclassified."""
    scored = iter(scores)
    return [judged(d, next(scored), noise) if d.verdict == "unclassified" else d for d in found]


def judged(divergence: Divergence, score: Score, noise: Noise) -> Divergence:
    """A tie if the likeliest token leads both tokens by no more than the noise."""
    lead = score.best - min(score.wanted, score.got)
    tie = lead <= noise.bound
    return dataclasses.replace(
        divergence,
        lead=lead,
        bound=noise.bound,
        verdict="tie" if tie else "defect",
        why=f"in float32 the likeliest token leads by {lead:.2e} nats, "
        + ("within" if tie else "beyond")
        + f" rounding ({noise.bound:.2e})",
    )


# -- asking a server ------------------------------------------------------------------------

#: Tokens asked for at each place of a prompt.
CANDIDATES = 20


def scores_of(url: str, found: Sequence[Divergence], concurrency: int = 4) -> list[Score]:
    """What the float32 server at ``url`` says of each unclassified divergence.

    Where a grammar forbids tokens, the likeliest of the two counts as the likeliest of all.
    """
    unclear = [d for d in found if d.verdict == "unclassified"]
    bodies = [
        {
            "input_ids": d.context,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 1,
            "token_ids_logprob": [d.wanted, d.got],
        }
        for d in unclear
    ]
    replies, _ = post_all(url, [("/generate", body) for body in bodies], concurrency=concurrency)
    return [_score(d, reply["meta_info"]) for d, reply in zip(unclear, replies, strict=True)]


def _score(divergence: Divergence, meta: dict[str, Any]) -> Score:
    asked = {token: value for value, token, _ in meta["output_token_ids_logprobs"][0]}
    wanted, got = asked[divergence.wanted], asked[divergence.got]
    best = meta["output_top_logprobs"][0][0][0]
    return Score(max(wanted, got) if divergence.constrained else best, wanted, got)


@dataclass(frozen=True)
class Led:
    """An answer of the served model without speculation, with its two best tokens at each place."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    top: tuple[tuple[tuple[float, int], tuple[float, int]], ...]


def leads(url: str, prompts: Sequence[Sequence[int]], max_new_tokens: int = 64) -> list[Led]:
    """Greedy answers of the server at ``url``, 16 at a time; :func:`rounding_noise` reads them."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    asked = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    bodies = [("/generate", {**asked, "input_ids": list(prompt)}) for prompt in prompts]
    replies, _ = post_all(url, bodies, concurrency=16)
    return [
        Led(tuple(prompt), tuple(reply["output_ids"]), _two_best(reply["meta_info"]))
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def _two_best(meta: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple((v, t) for v, t, _ in place) for place in meta["output_top_logprobs"])


def rounding_noise(url: str, served: Sequence[Led]) -> Noise:
    """How the served model's leads differ from those that the float32 server at ``url`` gives.

    At each place of the served answers: the difference of the log-probabilities of their two
    best tokens, once as served and once in float32 behind the same tokens. Only places with a
    lead below ``NEAR_TIE`` count, those at which answers can part; all if there is none.
    """
    bodies = [
        {
            "input_ids": [*answer.prompt_ids, *answer.output_ids],
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": CANDIDATES,
        }
        for answer in served
    ]
    replies, _ = post_all(url, [("/generate", body) for body in bodies], concurrency=4)
    pairs = [
        pair
        for answer, reply in zip(served, replies, strict=True)
        for pair in _leads_of(answer, reply["meta_info"]["input_top_logprobs"])
    ]
    near = [pair for pair in pairs if pair[0] < NEAR_TIE]
    errors = [abs(lead - exact) for lead, exact in near or pairs]
    if not errors:
        raise ValueError("the served answers are empty, so no rounding can be measured on them")
    return Noise(max(errors), statistics.median(errors), len(errors))


def _leads_of(answer: Led, exact: Sequence[Any]) -> Iterator[tuple[float, float]]:
    """(as served, in float32) at each place where float32 knows both tokens."""
    places = exact[len(answer.prompt_ids) :]
    for ((one, first), (other, second)), place in zip(answer.top, places, strict=True):
        known = {token: value for value, token, _ in place}
        if first in known and second in known:
            yield one - other, known[first] - known[second]

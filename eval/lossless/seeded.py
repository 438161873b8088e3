"""Seeded equality: with a seed, a sampled request gets the very tokens of the plain server.

SGLang reads seeds under ``--enable-deterministic-inference`` only. Requests of a run cut the
target's distribution all alike: SGLang's seeded sampler numbers candidates by rank as soon as
one request of the batch cuts it (greedy ones do), so that mixed batches do not reproduce even
without speculation. How far they do is counted as well: the same requests, all kinds in one
batch. Only greedy ones must come out the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.server import Server
from sglang_c2t.offline.client import Answer, differing, run_load

FLAGS = ("--enable-deterministic-inference",)

CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20, "top_p": 0.95},
}
"""How a run's requests cut the target's distribution."""

#: Kinds of requests that a mixed batch holds, in turn.
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, **CUTS}
MIXED = ", mixed"

#: At once: of the reference, of its control, and of the servers under test.
REFERENCE_BATCH, CONTROL_BATCH = 8, 3
BATCHES = (16, 1)


@dataclass(frozen=True)
class Reproduced:
    """One cut on one server, at so many requests at once."""

    server: str
    cut: str
    concurrency: int
    requests: int
    tokens: int
    accepted_drafts: int
    differing: list[int]  # numbers of requests
    promised: bool = True  # that none differs


def bodies(prompts: Sequence[Sequence[int]], kind: str) -> list[dict[str, Any]]:
    """A request per prompt, of different temperature and length, each with its seed."""
    return [
        {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": (1.0, 0.7)[i % 2],
                "max_new_tokens": (40, 9, 25)[i % 3],
                "sampling_seed": 1000 + i,
                **KINDS[kind],
            },
        }
        for i, prompt in enumerate(prompts)
    ]


def reproduced(
    name: str, cut: str, concurrency: int, answers: Sequence[Answer],
    expected: Sequence[tuple[int, ...]], promised: bool = True,
) -> Reproduced:  # fmt: skip
    """Compare answers with what was expected."""
    outputs = [answer.output_ids for answer in answers]
    return Reproduced(
        server=name,
        cut=cut,
        concurrency=concurrency,
        requests=len(outputs),
        tokens=sum(map(len, outputs)),
        accepted_drafts=sum(a.meta_info.get("spec_num_correct_drafts", 0) for a in answers),
        differing=differing(outputs, expected),
        promised=promised,
    )


def check(
    server: Server, name: str, prompts: Sequence[Sequence[int]],
    expected: dict[str, list[tuple[int, ...]]], batches: Sequence[int],
    on_answer: Callable[[], None],
) -> list[Reproduced]:  # fmt: skip
    """Every cut at every batch size, then all kinds mixed, each from an empty cache."""
    done = []
    for cut in CUTS:
        for concurrency in batches:
            count = num_asked(len(prompts), concurrency)
            asked = bodies(prompts, cut)[:count]
            server.flush_cache()
            result = run_load(server.url, asked, concurrency=concurrency, on_answer=on_answer)
            done.append(reproduced(name, cut, concurrency, result.answers, expected[cut][:count]))
    server.flush_cache()
    turns = [body for prompt in zip(*(bodies(prompts, kind) for kind in KINDS), strict=True)
             for body in prompt]  # fmt: skip
    result = run_load(server.url, turns, concurrency=batches[0], on_answer=on_answer)
    for first, kind in enumerate(KINDS):
        answers = result.answers[first :: len(KINDS)]
        done.append(reproduced(name, kind + MIXED, batches[0], answers, expected[kind],
                               promised=kind == "greedy"))  # fmt: skip
    return done


def num_asked(num_prompts: int, concurrency: int) -> int:
    """How many of the prompts are sent: one at a time only a fourth of them."""
    return num_prompts if concurrency > 1 else -(-num_prompts // 4)


def num_answers(num_prompts: int, batches: Sequence[int]) -> int:
    """How many answers :func:`check` waits for."""
    alike = len(CUTS) * sum(num_asked(num_prompts, concurrency) for concurrency in batches)
    return alike + len(KINDS) * num_prompts

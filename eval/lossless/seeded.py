"""Seeded equality: a sampled request with a seed gets the tokens of the plain server.

SGLang reads seeds only under ``--enable-deterministic-inference``. Its seeded sampler numbers
candidates by rank as soon as one request of the batch restricts its distribution. Therefore only
uniform batches and greedy requests are promised to repeat; other requests of mixed batches are
counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.server import Server
from sglang_c2t.offline.client import differing, run_load

FLAGS = ("--enable-deterministic-inference",)

#: How the requests of a uniform batch restrict the target's distribution.
CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20, "top_p": 0.95},
}
#: The kinds of requests in a mixed batch, in turn.
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, **CUTS}

#: Concurrency: of the reference, of its control, and of the servers under test.
REFERENCE_BATCH, CONTROL_BATCHES, BATCHES = 8, (3,), (16, 1)

Expected = Mapping[str, Sequence[tuple[int, ...]]]  # outputs by kind


@dataclass(frozen=True)
class Reproduced:
    """One kind of request on one server."""

    server: str
    kind: str
    concurrency: int
    requests: int
    tokens: int
    accepted_drafts: int
    differing: list[int]  # indices of requests
    promised: bool = True  # to repeat


def bodies(prompts: Sequence[Sequence[int]], kind: str) -> list[dict[str, Any]]:
    """One request per prompt, with its seed, of various temperatures and lengths."""
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


def expect(server: Server, prompts: Sequence[Sequence[int]]) -> Expected:
    """Outputs of the server without speculation."""
    return {
        kind: run_load(server.url, bodies(prompts, kind), concurrency=REFERENCE_BATCH).outputs
        for kind in KINDS
    }


def check(
    server: Server, name: str, prompts: Sequence[Sequence[int]], expected: Expected,
    batches: Sequence[int],
) -> list[Reproduced]:  # fmt: skip
    """Each cut at each batch size, then all kinds in one batch, always from an empty cache."""
    found = []
    loads = [((cut,), concurrency) for cut in CUTS for concurrency in batches]
    for kinds, concurrency in [*loads, (tuple(KINDS), batches[0])]:
        count = len(prompts) if concurrency > 1 else -(-len(prompts) // 4)
        turns = zip(*(bodies(prompts[:count], kind) for kind in kinds), strict=True)
        server.flush_cache()
        asked = [body for together in turns for body in together]
        answers = run_load(server.url, asked, concurrency=concurrency).answers
        for first, kind in enumerate(kinds):
            mine = answers[first :: len(kinds)]
            outputs = [answer.output_ids for answer in mine]
            drafts = sum(answer.meta_info.get("spec_num_correct_drafts", 0) for answer in mine)
            where, tokens = differing(outputs, expected[kind][:count]), sum(map(len, outputs))
            mixed = len(kinds) > 1
            found.append(Reproduced(
                name, f"{kind}, mixed" if mixed else kind, concurrency, count, tokens, drafts,
                where, promised=not mixed or kind == "greedy",
            ))  # fmt: skip
    return found

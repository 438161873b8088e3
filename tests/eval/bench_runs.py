"""Made-up benchmark runs, written through the benchmark's own records.

A run is a function of its arguments. Accepted drafts are drawn with a chance per draft that
depends on the family; methods that prune propose fewer drafts where a coin says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.bench.records import Cell, Method, Request, Run, write_cell, write_run

FAMILIES = {"math": 0.8, "instruction": 0.6, "summary": 0.5}
BASELINE = "no speculation"


@dataclass(frozen=True)
class Made:
    """A method and how it behaves."""

    method: Method
    length: int = 0  # drafts at most
    keep: float = 1.0  # chance that a draft is followed by another
    step_cost: float = 0.0  # of a draft, in steps of one token


def made_methods() -> list[Made]:
    """One of each kind, and one policy at several thresholds."""
    c2t = ["--c2t", "--c2t-policy", "c2t"]
    return [
        Made(Method(BASELINE, "none", [], baseline=True)),
        *(Made(Method(f"fixed {n}", "fixed", ["--speculative-num-steps", str(n)]), n, 1.0, 0.22)
          for n in (1, 3, 5)),
        Made(Method("adaptive", "adaptive", ["--speculative-adaptive"]), 3, 0.9, 0.2),
        Made(Method("EAGLE-2 16", "tree", ["--speculative-eagle-topk", "4"]), 5, 1.0, 0.24),
        *(Made(Method(f"c2t beta {beta}", "c2t", c2t, beta), 5, 1 - beta, 0.15)
          for beta in (0.2, 0.4, 0.6)),
        Made(Method("c2t-plus", "c2t", ["--c2t", "--c2t-policy", "c2t-plus"]), 5, 0.75, 0.12),
    ]  # fmt: skip


Edit = Callable[[Cell], Cell | None]


def write_made_run(
    folder: Path,
    *,
    methods: Sequence[Made] | None = None,
    loads: Sequence[tuple[float, Sequence[int]]] = ((0.0, (1, 4, 16)), (1.0, (4,))),
    repeats: int = 3,
    num_prompts: int = 12,
    seed: int = 0,
    edit: Edit = lambda cell: cell,
    provenance: dict[str, Any] | None = None,
    sha256: str = "5ca1ab1e" * 8,
) -> Path:
    """Write a whole run; ``edit`` changes a cell or, with None, leaves it out."""
    methods = made_methods() if methods is None else methods
    families = [list(FAMILIES)[i % len(FAMILIES)] for i in range(num_prompts)]
    parts = [
        {"name": f"{family} prompts", "family": family, "n": families.count(family),
         "sha256": sha256, "source": f"{family}.jsonl"}
        for family in dict.fromkeys(families)
    ]  # fmt: skip
    write_run(
        folder,
        Run(
            started="2026-01-02T03:04:05+00:00",
            config={
                "name": "made-up",
                "repeats": repeats,
                "requests": {"max_new_tokens": 40, "equal_outputs": "greedy"},
                "load": [{"temperature": t, "concurrency": list(cs),
                          "prompts": [num_prompts] * len(cs)} for t, cs in loads],
            },
            provenance=provenance or {
                "versions": {"sglang": "0.5.23", "torch": "2.9"},
                "revision": "abc1234",
                "hardware": {"cpu": "a processor", "cores": 2, "gpus": []},
                "argv": ["python", "-m", "eval.run", "made-up.toml"],
            },
            dataset={"name": "a mix", "n": num_prompts, "sha256": sha256, "parts": parts},
            methods=tuple(made.method for made in methods),
        ),
    )  # fmt: skip
    for temperature, concurrencies in loads:
        for concurrency in concurrencies:
            for repeat in range(repeats):
                for made in methods:
                    rng = random.Random(f"{seed} {made} {temperature} {concurrency} {repeat}")
                    cell = edit(made_cell(made, temperature, concurrency, repeat, families, rng))
                    if cell is not None:
                        write_cell(folder, cell)
    return folder


def made_cell(
    made: Made, temperature: float, concurrency: int, repeat: int, families: Sequence[str],
    rng: random.Random,
) -> Cell:  # fmt: skip
    """One cell; its speed falls with the drafts verified, the more the larger the batch."""
    requests = [
        made_request(made, i, family, temperature, concurrency, rng)
        for i, family in enumerate(families)
    ]
    tokens = sum(request.output_len for request in requests)
    verify_ct, correct, proposed = (
        sum(request.meta.get(key, 0) for request in requests)
        for key in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    rate = 60.0 * concurrency / (1 + concurrency / 40)
    if verify_ct:
        tau, gamma = 1 + correct / verify_ct, proposed / verify_ct
        rate *= tau / (1 + gamma * made.step_cost * (0.4 + concurrency / 16))
    rate *= rng.uniform(0.97, 1.03)
    seconds = tokens / rate
    gated = made.method.kind.startswith("c2t")
    told = {
        "c2t:verifications_total{rank='0'}": float(verify_ct),
        "c2t:correct_drafts_total{rank='0'}": float(correct),
        "c2t:proposed_drafts_total{rank='0'}": float(proposed),
        "c2t:verify_rows_total{rank='0'}": float(verify_ct + proposed),
        "c2t:proposed_length_count{rank='0'}": float(verify_ct),
        "c2t:proposed_length_sum{rank='0'}": float(proposed),
    }
    return Cell(
        method=made.method.name,
        temperature=temperature,
        concurrency=concurrency,
        repeat=repeat,
        started="2026-01-02T03:05:00+00:00",
        duration_s=seconds,
        output_tokens=tokens,
        tokens_per_second=rate,
        client={"completed": len(requests)},
        work={
            "target_decode_rows": 0 if verify_ct else tokens,
            "verify_rows": proposed + verify_ct,
            "draft_forwards": verify_ct * made.length // max(1, concurrency // 2),
        },
        metrics=told if gated else {},
        server_argv=["python", "-m", "sglang.launch_server", *made.method.flags],
        requests=tuple(requests),
    )


def made_request(
    made: Made, index: int, family: str, temperature: float, concurrency: int, rng: random.Random
) -> Request:
    """One request; at temperature 0 its output depends on the prompt alone."""
    ids = random.Random(index if temperature == 0 else rng.random())
    output = tuple(ids.randrange(1000) for _ in range(20 + ids.randrange(20)))
    meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
    if made.length:
        meta |= made_meta(made, len(output) - 1, FAMILIES[family], rng)
    first = 0.02 * concurrency * rng.uniform(0.5, 1.5)
    others = 0.01 * len(output) * rng.uniform(0.8, 1.2)
    return Request(
        index=index, family=family, prompt_len=50 + index, output_len=len(output),
        output_ids=output, start_s=0.0, latency_s=first + others,
        ttft_s=first, success=True, meta=meta,
    )  # fmt: skip


def made_meta(made: Made, tokens: int, chance: float, rng: random.Random) -> dict[str, Any]:
    """Return SGLang's ``meta_info`` of a request that gained ``tokens`` by verifications."""
    gated = made.method.kind.startswith("c2t")
    accepts, lengths = [0] * (made.length + 1), [0] * (made.length + 2)
    verify_ct = correct = proposed = 0
    while tokens > 0:
        length = 1
        while length < made.length and rng.random() < made.keep:
            length += 1
        accepted = 0
        while accepted < min(length, tokens - 1) and rng.random() < chance:
            accepted += 1
        tokens -= accepted + 1
        verify_ct, correct, proposed = verify_ct + 1, correct + accepted, proposed + length
        accepts[accepted] += 1
        lengths[length + 1] += 1
    meta = {
        "spec_verify_ct": verify_ct,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed if gated else verify_ct * made.length,
        "spec_correct_drafts_histogram": accepts,
    }
    return meta | ({"spec_cap_lens_histogram": lengths} if gated else {})


def failing(cell: Cell, numbers: Sequence[int], error: str = "503 busy") -> Cell:
    """The cell with these requests failed."""
    requests = tuple(
        replace(r, success=False, error=error, output_ids=(), output_len=0, meta={})
        if r.index in numbers
        else r
        for r in cell.requests
    )
    tokens = sum(r.output_len for r in requests)
    return replace(cell, requests=requests, output_tokens=tokens,
                   tokens_per_second=tokens / cell.duration_s)  # fmt: skip

"""Real servers on a GPU: with ``--c2t``, every greedy answer is that of no speculation.

CUDA graphs and overlap are on, batches from 1 to 256. Equal up to ties, see ``ties.py``; how
often SGLang without speculation parts from itself between batch sizes is the control.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eval.gpu import plugins
from eval.gpu.ties import Reference, excused, parting
from eval.prompts import demo_mix
from eval.server import TARGET, Launch, Server, gpu_environment, running, speculative_flags
from sglang_c2t.offline.servers import interrupted_by_sigterm
from tests.gpu import gpu

#: A device that is slow may be asked less.
BATCHES = tuple(map(int, os.environ.get("GPU_TEST_BATCHES", "1 16 64 256").split()))
NEW_TOKENS = int(os.environ.get("GPU_TEST_TOKENS", "64"))
COMMON = (
    "--mem-fraction-static", "0.4", "--max-running-requests", str(max(BATCHES)),
    "--cuda-graph-bs-decode", *map(str, BATCHES),
    # Prompts are never shared, so nothing else needs to run; prefill is not what is tested.
    "--disable-radix-cache", "--grammar-backend", "none", "--disable-prefill-cuda-graph",
    "--mm-feature-transport", "cpu",  # the default reserves 1 GiB of GPU memory for images
    "--log-level-http", "warning",
)  # fmt: skip


class Case(NamedTuple):
    """A speculative server."""

    backend: str
    algorithm: str
    topk: int
    nodes: int
    flags: tuple[str, ...] = ("--c2t",)


GATED = ("--c2t", "--c2t-policy", "c2t")

CASES = {
    "chains, fa3": Case("fa3", "EAGLE3", 1, 6, GATED),
    "planned chains, fa3": Case("fa3", "EAGLE3", 1, 6),
    "chains, fa3, eager": Case("fa3", "EAGLE3", 1, 6, (*GATED, "--disable-cuda-graph")),
    "chains, flashinfer": Case("flashinfer", "EAGLE3", 1, 6, GATED),
    "planned chains, flashinfer": Case("flashinfer", "EAGLE3", 1, 6),
    "chains of a standalone draft, fa3": Case("fa3", "STANDALONE", 1, 6),
    "trees, flashinfer": Case("flashinfer", "EAGLE3", 4, 16),
    "trees of a standalone draft, flashinfer": Case("flashinfer", "STANDALONE", 4, 16),
    "trees, flashinfer, eager": Case(
        "flashinfer", "EAGLE3", 4, 16, ("--c2t", "--disable-cuda-graph")
    ),
    "SGLang's own chains, fa3": Case("fa3", "EAGLE3", 1, 6, ()),
}


@contextmanager
def served(name: str, *flags: str) -> Iterator[Server]:
    """A server on the GPU with our plugin, stopped as well where the time of a session ends."""
    with ExitStack() as stack:
        stack.enter_context(interrupted_by_sigterm())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env = gpu_environment() | plugins.environment(["c2t"])
        started = Launch(name, (*COMMON, *flags), TARGET, env, common=())
        yield stack.enter_context(running(started, work))


def answers(server: Server, batch: int, **more: Any) -> list[dict[str, Any]]:
    """Replies to the first ``batch`` prompts, asked at once."""
    texts = [prompt.text for prompt in demo_mix(max(BATCHES))][:batch]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    replies: list[dict[str, Any]] = server.generate(text=texts, sampling_params=sampling, **more)
    return replies


class Baseline(NamedTuple):
    """Answers without speculation, and how often they differ at other batch sizes."""

    references: list[Reference]
    parted: float


@cache
def baseline(backend: str) -> Baseline:
    """One server per attention backend, for all cases."""
    with served(f"none-{backend}", "--attention-backend", backend) as server:
        logged = answers(server, max(BATCHES), return_logprob=True, top_logprobs_num=2)
        references = [Reference.of(reply) for reply in logged]
        parted = total = 0
        for batch in BATCHES[1:-1]:
            for reference, reply in zip(references, answers(server, batch), strict=False):
                parted += parting(reference, reply["output_ids"]) is not None
                total += 1
    return Baseline(references, parted / total)


@gpu
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_no_speculation(name: str) -> None:
    case = CASES[name]
    references, control = baseline(case.backend)
    num_steps = 5 if case.topk == 1 else 4
    draft = speculative_flags(case.algorithm, num_steps, case.topk, case.nodes)
    flags = ("--attention-backend", case.backend, *draft, *case.flags)
    wrong, parted, total, verified, generated = [], 0, 0, 0, 0
    with served(re.sub(r"\W+", "-", name), *flags) as server:
        for batch in BATCHES:
            for i, reply in enumerate(answers(server, batch)):
                tokens, meta = reply["output_ids"], reply["meta_info"]
                generated += meta["completion_tokens"]
                verified += meta["spec_verify_ct"]
                parted += parting(references[i], tokens) is not None
                total += 1
                if not excused(references[i], tokens):
                    wrong.append((batch, i, parting(references[i], tokens)))
        log = server.log.read_text(errors="replace")
    told = f"{parted}/{total} parted, control {control:.1%}, tau {generated / verified:.2f}"
    print(f"{name}: {told}")
    assert not wrong, f"{told}; batch, prompt, place: {wrong[:10]}"
    assert parted / total <= max(0.05, 3 * control), told
    assert generated / verified > 1.3, told
    if "--c2t" in case.flags:
        kind = "trees" if case.topk > 1 else "chains"
        assert re.search(rf"(ragged|packed) verification of {kind}", log), "verified full width"

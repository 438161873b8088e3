"""A target of latent attention (MLA) and experts that drafts with its own layer (NEXTN): the same
tokens as without speculation, and the same keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.prompts import demo_mix
from eval.server import MLA, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import LoadResult, differing, greedy, run_load
from tests.e2e.conftest import (
    BODIES,
    CONCURRENCY,
    REPOSITORY,
    GatedServer,
    assert_same_logprobs,
    run_beside_aborts,
    switchable_flags,
    verified,
)

#: SGLang reads seeds under this flag only.
SEEDED = ("--enable-deterministic-inference",)


def sampled(**cut: float) -> list[dict[str, Any]]:
    """Bodies with seeds of their own, all cut alike: SGLang draws otherwise where one is cut."""
    return [
        {
            "text": prompt.text,
            "sampling_params": {
                "temperature": (1.0, 0.7)[n % 2], "sampling_seed": 100 + n, "max_new_tokens": 24,
                "ignore_eos": True, **cut,
            },
        }
        for n, prompt in enumerate(demo_mix(8, seed=11))
    ]  # fmt: skip


#: What is asked for in one go: greedy answers of all lengths, and samples.
LOADS = BODIES, sampled(), sampled(top_p=0.9)

TREES = {"topk": 3, "num_draft_tokens": 10}


@pytest.fixture(scope="module")
def alone(logs: Path) -> Any:
    """A server without speculation."""
    with running(Launch("latent-plain", SEEDED, MLA), logs) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(alone: Server) -> list[LoadResult]:
    """Its answers, one at a time."""
    return [run_load(alone.url, bodies, concurrency=1) for bodies in LOADS]


def launch(name: str, *flags: str, env: dict[str, str] | None = None, **shape: int) -> Launch:
    environment = {"PYTHONPATH": str(REPOSITORY), **(env or {})}
    every = (*speculative_flags("NEXTN", 4, **shape), *SEEDED, *flags)
    return Launch(f"latent-{name}", every, MLA, environment)


def test_chains_cut_at_random_and_retracted_give_the_same_tokens(
    wanted: list[LoadResult], logs: Path
) -> None:
    """SGLang retracts every third step; its strict memory check ends the server on a leak."""
    control = logs / "gate-latent"
    retracting = {"SGLANG_TEST_RETRACT": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    gated = launch("gated", *switchable_flags(control, logs), env=retracting)
    with running(gated, logs) as server:
        for mode in ("c2t", "random"):
            result = GatedServer(server, "NEXTN", control).run(mode)
            assert differing(result.outputs, wanted[0].outputs) == [], mode
        assert sum(answer.meta_info["num_retractions"] for answer in result.answers) > 0
        server.flush_cache()
    assert "ragged verification of chains" in server.log.read_text()


@pytest.mark.parametrize(("kind", "shape"), [("chains", {}), ("trees", TREES)])
def test_planned_steps_give_the_same_tokens_samples_and_keys(
    wanted: list[LoadResult], alone: Server, logs: Path, kind: str,
    shape: dict[str, int],
) -> None:  # fmt: skip
    """Joins, aborts, seeds; and what a verification has kept of a token is what a prompt keeps."""
    with running(launch(f"planned-{kind}", "--c2t", **shape), logs) as server:
        result = run_beside_aborts(server)
        assert differing(result.outputs, wanted[0].outputs) == []
        drafted = [answer for answer in result.answers if verified(answer)]
        assert sum(a.meta_info["spec_num_correct_drafts"] for a in drafted) > len(drafted)
        for bodies, answers in zip(LOADS[1:], wanted[1:], strict=True):
            server.flush_cache()  # once all are gone: beside a greedy one samples are cut
            drawn = run_load(server.url, bodies, concurrency=CONCURRENCY)
            assert differing(drawn.outputs, answers.outputs) == []
        assert server.c2t_state()["planner"]["steps"] > 50

        server.flush_cache()
        asked = [greedy(prompt.text, 24) for prompt in demo_mix(8, seed=12)]
        said = run_load(server.url, asked, concurrency=CONCURRENCY).answers
        again = [_behind(body, answer) for body, answer in zip(asked, said, strict=True)]
        kept = run_load(server.url, again, concurrency=1)
        for body, answer in zip(again, kept.answers, strict=True):
            assert answer.meta_info["cached_tokens"] > len(body["input_ids"]) - 8
        alone.flush_cache()
        assert_same_logprobs(kept, run_load(alone.url, again, concurrency=1))


def _behind(body: dict[str, Any], answer: Any) -> dict[str, Any]:
    """What stands behind an answer, of which the server keeps keys, or reads them anew."""
    ids = [*_tokenizer()(body["text"])["input_ids"], *answer.output_ids]
    parameters = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    return {
        "input_ids": ids, "sampling_params": parameters, "return_logprob": True,
        "top_logprobs_num": 5,
    }  # fmt: skip


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MLA)

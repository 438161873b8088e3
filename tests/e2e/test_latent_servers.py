"""A target of latent attention (MLA) and experts that drafts with its own layer (NEXTN): the same
tokens as without speculation, and the same keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.prompts import demo_mix
from eval.server import MLA, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import greedy, run_load
from tests.e2e.conftest import (
    BODIES,
    CONCURRENCY,
    REPOSITORY,
    assert_same_logprobs,
    replace_text,
    switchable_flags,
)
from tests.e2e.ordeal import FLAGS, RETRACTING, Ordeal

TREES = {"topk": 3, "num_draft_tokens": 10}


@pytest.fixture(scope="module")
def alone(logs: Path) -> Any:
    """A server without speculation."""
    with running(Launch("latent-plain", FLAGS, MLA), logs) as server:
        yield server


@pytest.fixture(scope="module")
def ordeal(alone: Server) -> Ordeal:
    prompts = [_tokenizer()(prompt.text)["input_ids"] for prompt in demo_mix(8, seed=11)]
    return Ordeal.of(alone, BODIES, prompts)


def launch(name: str, *flags: str, **shape: int) -> Launch:
    environment = {"PYTHONPATH": str(REPOSITORY), **RETRACTING}
    every = (*speculative_flags("NEXTN", 4, **shape), *FLAGS, *flags)
    return Launch(f"latent-{name}", every, MLA, environment)


def test_chains_cut_at_random_give_the_same_tokens(ordeal: Ordeal, logs: Path) -> None:
    control = logs / "gate-latent"
    with running(launch("gated", *switchable_flags(control, logs)), logs) as server:
        replace_text(control, "random")
        ordeal.undergo(server)
    assert "ragged verification of chains" in server.log.read_text()


@pytest.mark.parametrize(("kind", "shape"), [("chains", {}), ("trees", TREES)])
def test_planned_steps_give_the_same_tokens_samples_and_keys(
    ordeal: Ordeal, alone: Server, logs: Path, kind: str, shape: dict[str, int]
) -> None:
    """And what a verification has kept of a token is what a prompt keeps."""
    with running(launch(f"planned-{kind}", "--c2t", **shape), logs) as server:
        ordeal.undergo(server)
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

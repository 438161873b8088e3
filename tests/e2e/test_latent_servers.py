"""A target of latent attention (MLA) and experts that drafts with its own layer (NEXTN).

Tokens and keys are those without speculation, on one rank and on two of data-parallel attention:
there each rank has requests of its own, and both meet in the experts and in the draft layer. A rank
that drafts another number of layers than the other, or none, waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eval.prompts import demo_mix
from eval.server import MLA, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import differing, run_load
from tests.e2e.conftest import (
    BODIES,
    CONCURRENCY,
    REPOSITORY,
    replace_text,
    switchable_flags,
    verified,
)
from tests.e2e.mixed_load import FLAGS, RETRACTING, LosslessnessSuite, assert_keys_of_a_prompt
from tests.e2e.test_data_parallel import to_rank
from tests.e2e.test_unusual_servers import BIND

TREES = {"topk": 3, "num_draft_tokens": 10}


@pytest.fixture(scope="module")
def plain(logs: Path) -> Iterator[Server]:
    """Start a server without speculation."""
    with running(Launch("latent-plain", FLAGS, MLA), logs) as server:
        yield server


@pytest.fixture(scope="module")
def suite(plain: Server) -> LosslessnessSuite:
    tokenizer = AutoTokenizer.from_pretrained(MLA)
    prompts = [tokenizer(prompt.text)["input_ids"] for prompt in demo_mix(8, seed=11)]
    return LosslessnessSuite.of(plain, BODIES, prompts)


def launch(name: str, *flags: str, **shape: int) -> Launch:
    environment = {"PYTHONPATH": str(REPOSITORY), **RETRACTING}
    every = (*speculative_flags("NEXTN", 4, **shape), *FLAGS, *flags)
    return Launch(f"latent-{name}", every, MLA, environment)


def test_chains_cut_at_random_give_the_same_tokens_and_planned_ones_the_same_keys(
    suite: LosslessnessSuite, plain: Server, logs: Path
) -> None:
    """KV rows that a verification kept equal those of a prefill."""
    control = logs / "gate-latent"
    with running(launch("chains", *switchable_flags(control, logs)), logs) as server:
        replace_text(control, "random")
        suite.run(server)
        server.switch(policy="auto")
        assert_planned(server, suite, plain)
    assert "ragged verification of chains" in server.log.read_text()


def test_planned_trees_give_the_same_tokens_samples_and_keys(
    suite: LosslessnessSuite, plain: Server, logs: Path
) -> None:
    with running(launch("trees", "--c2t", **TREES), logs) as server:
        suite.run(server)
        assert_planned(server, suite, plain)


def assert_planned(server: Server, suite: LosslessnessSuite, plain: Server) -> None:
    """Assert that planned steps keep the tokens, and the keys that a prompt would have."""
    answered = run_load(server.url, BODIES[:16], concurrency=CONCURRENCY)
    assert answered.outputs == suite.wanted[0].outputs[:16]
    assert server.c2t_state()["planner"]["steps"] > 20
    assert_keys_of_a_prompt(server, plain, MLA)


# -- two ranks of data-parallel attention -------------------------------------------------

#: SGLang's watchdog ends a server whose rank waits for ever.
TWO_RANKS = (
    *speculative_flags("NEXTN", 4), "--c2t", "--tp-size", "2", "--dp-size", "2",
    "--enable-dp-attention", "--watchdog-timeout", "60", *FLAGS,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(logs: Path) -> Iterator[Server]:
    with running(Launch("dp-attention", TWO_RANKS, MLA, {**BIND, **RETRACTING}), logs) as server:
        yield server


def test_both_ranks_answer_as_one_without_speculation_while_others_come_and_vanish(
    ranks: Server, suite: LosslessnessSuite
) -> None:
    suite.run(ranks)
    result = run_load(ranks.url, BODIES[:12], concurrency=CONCURRENCY)
    assert {answer.meta_info["dp_rank"] for answer in result.answers} == {0, 1}
    assert "ragged verification of chains" in ranks.log.read_text()


@pytest.mark.parametrize(
    "policy", [{"policy": "auto"}, {"policy": "c2t-plus", "beta": 0.5}], ids=lambda p: p["policy"]
)
def test_a_rank_that_serves_nobody_keeps_step_with_the_other(
    ranks: Server, suite: LosslessnessSuite, policy: dict[str, Any]
) -> None:
    """Planned, and gated: a batch alone would end its drafts once no request continues."""
    ranks.switch(**policy)
    ranks.flush_cache()
    result = run_load(ranks.url, to_rank(1, BODIES[:8]), concurrency=3)
    assert differing(result.outputs, suite.wanted[0].outputs[:8]) == []
    assert {answer.meta_info["dp_rank"] for answer in result.answers} == {1}
    steps, drafts = (
        sum(answer.meta_info[name] for answer in result.answers if verified(answer))
        for name in ("spec_verify_ct", "spec_num_proposed_drafts")
    )
    assert 0 < drafts < 4 * steps, "nothing was cut"

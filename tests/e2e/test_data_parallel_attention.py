"""Two ranks whose attention is data parallel: requests of their own, and experts together. A target
of latent attention drafts with its own layer, in which ranks meet as well, so that one that drafts
another number of layers than the other, or none, waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eval.prompts import demo_mix
from eval.server import MLA, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import LoadResult, differing, run_load
from tests.e2e.conftest import BODIES, CONCURRENCY, verified
from tests.e2e.ordeal import FLAGS as SEEDS
from tests.e2e.ordeal import RETRACTING, Ordeal
from tests.e2e.test_data_parallel import to_rank
from tests.e2e.test_unusual_servers import BIND

#: Answers of all lengths, one of them behind a prompt of several chunks.
ASKED = [*BODIES[:6], BODIES[-1]]

#: A rank that waits for ever ends the server.
FLAGS = (
    *speculative_flags("NEXTN", 4), "--c2t", "--tp-size", "2", "--dp-size", "2",
    "--enable-dp-attention", "--watchdog-timeout", "60", *SEEDS,
)  # fmt: skip


@pytest.fixture(scope="module")
def ordeal(logs: Path) -> Ordeal:
    """Answered by one rank."""
    tokenizer = AutoTokenizer.from_pretrained(MLA)
    prompts = [tokenizer(prompt.text)["input_ids"] for prompt in demo_mix(8, seed=11)]
    with running(Launch("dp-attention-plain", SEEDS, MLA), logs) as server:
        return Ordeal.of(server, ASKED, prompts)


@pytest.fixture(scope="module")
def ranks(
    logs: Path,
    ordeal: Ordeal,  # so that its server has gone
) -> Iterator[Server]:
    with running(Launch("dp-attention", FLAGS, MLA, {**BIND, **RETRACTING}), logs) as server:
        yield server


def _drafts(result: LoadResult, what: str) -> int:
    name = f"spec_num_{what}_drafts"
    return sum(answer.meta_info[name] for answer in result.answers if verified(answer))


def test_both_ranks_answer_as_one_without_speculation_while_others_come_and_vanish(
    ranks: Server, ordeal: Ordeal
) -> None:
    ordeal.undergo(ranks)
    result = run_load(ranks.url, ASKED, concurrency=CONCURRENCY)
    assert {answer.meta_info["dp_rank"] for answer in result.answers} == {0, 1}
    assert "ragged verification of chains" in ranks.log.read_text()


@pytest.mark.parametrize(
    "policy", [{"policy": "auto"}, {"policy": "c2t-plus", "beta": 0.5}], ids=lambda p: p["policy"]
)
def test_a_rank_that_serves_nobody_keeps_step_with_the_other(
    ranks: Server, ordeal: Ordeal, policy: dict[str, Any]
) -> None:
    """Planned, and gated, where a batch alone would end its drafts once nobody goes on."""
    ranks.switch(**policy)
    ranks.flush_cache()
    result = run_load(ranks.url, to_rank(1, ASKED), concurrency=3)
    assert differing(result.outputs, ordeal.wanted[0].outputs) == []
    assert {answer.meta_info["dp_rank"] for answer in result.answers} == {1}
    steps = sum(answer.meta_info["spec_verify_ct"] for answer in result.answers if verified(answer))
    assert 0 < _drafts(result, "proposed") < 4 * steps, "nothing was cut"

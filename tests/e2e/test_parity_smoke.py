"""One mixed batch, three servers: without speculation, with chains, with trees; the same tokens.

Small on purpose: it also runs beside the older SGLang that we serve (`make parity-old`).
"""

from __future__ import annotations

import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import requests

from eval.lossless.seeded import FLAGS
from eval.prompts import demo_mix
from eval.server import DRAFTS, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import LoadResult, differing, greedy, run_load
from sglang_c2t.srt.versions import TESTED
from tests.e2e.conftest import TREE, verified, verified_rows_reported

#: The shortest command.
SHORTEST = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", DRAFTS["EAGLE3"])

GATED = {
    "chains": ("--c2t", *speculative_flags("EAGLE3")),
    "trees": ("--c2t", *speculative_flags("STANDALONE", **TREE)),
    "shortest": ("--c2t", *map(str, SHORTEST)),
}
WIDTH = {"chains": 6, "trees": TREE["num_draft_tokens"], "shortest": 6}


def batch() -> list[dict[str, Any]]:
    """16 requests of different lengths, every fourth one sampled with a seed."""
    bodies = []
    for number, prompt in enumerate(demo_mix(16)):
        body = greedy(prompt.text, max_new_tokens=(48, 7, 24, 64, 2)[number % 5])
        if number % 4 == 3:
            # A seeded draw of SGLang's depends on whether anything in the batch is cut off, as
            # greedy requests are (top_k 1): with a top_p, it always is.
            sampled = {"temperature": 0.8, "top_p": 0.9, "sampling_seed": number}
            body["sampling_params"] |= sampled
        bodies.append(body)
    return bodies


@pytest.fixture(scope="module")
def without_speculation(plain: Server) -> list[tuple[int, ...]]:
    """The outputs of the batch, one request at a time."""
    return run_load(plain.url, batch(), concurrency=1).outputs


#: The other files prove more of these two beside the newest SGLang.
ELSEWHERE = ("chains", "trees") if version("sglang") == TESTED[-1] else ()


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.extended) if k in ELSEWHERE else k for k in GATED]
)
def test_a_mixed_batch_gets_the_tokens_of_a_server_without_speculation(
    logs: Path, without_speculation: list[tuple[int, ...]], kind: str
) -> None:
    """Requests join as others leave, and one is aborted among them."""
    with running(Launch(f"smoke-{kind}", (*FLAGS, *GATED[kind])), logs) as server:
        result, finish_reason = serve_beside_an_abort(server)
        assert server.c2t_state()["enabled"]
    assert differing(result.outputs, without_speculation) == []
    assert finish_reason["type"] == "abort"
    # Drafts were pruned, and not all of them away.
    steps = sum(a.meta_info["spec_verify_ct"] for a in result.answers if verified(a))
    assert steps < verified_rows_reported(result.answers) < steps * WIDTH[kind]


def serve_beside_an_abort(server: Server) -> tuple[LoadResult, dict[str, Any]]:
    """Serve the batch, 6 at a time, and abort a long request after the fourth answer.

    Also returns how the long request ended.
    """
    ended: list[dict[str, Any]] = []
    victim: dict[str, Any] = {**greedy(demo_mix(1, seed=9)[0].text, 1500), "rid": "victim"}
    victim["sampling_params"]["ignore_eos"] = True
    sender = threading.Thread(target=lambda: ended.append(server.generate(**victim)))
    answers = 0

    def abort_after_the_fourth() -> None:
        nonlocal answers
        answers += 1
        if answers == 4:
            requests.post(f"{server.url}/abort_request", json={"rid": "victim"}, timeout=60)

    sender.start()
    result = run_load(server.url, batch(), concurrency=6, on_answer=abort_after_the_fourth)
    sender.join(timeout=60)
    return result, ended[0]["meta_info"]["finish_reason"]

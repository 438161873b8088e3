"""A server of two HTTP worker processes: each answers ``/c2t`` and checks requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.srt import environment
from tests.e2e.conftest import BODIES, CONCURRENCY

AS_USERS_DO = True  # uvicorn's workers are interpreters of their own

ADMIN = "sesame"
KEY = {"Authorization": f"Bearer {ADMIN}"}

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not environment.names_http_app(), reason="refused beside this SGLang"),
]


@pytest.fixture(scope="module")
def workers(logs: Path) -> Iterator[Server]:
    flags = (*speculative_flags("EAGLE3"), "--c2t", "--c2t-policy", "c2t",
             "--tokenizer-worker-num", "2", "--admin-api-key", ADMIN)  # fmt: skip
    patient = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}  # while they import SGLang
    with running(Launch("http-workers", flags, env=patient), logs) as server:
        yield server


def statuses(server: Server, body: dict[str, Any], count: int = 12) -> set[int]:
    """Status codes of requests on separate connections, so that both processes serve some."""
    urls = [f"{server.url}/generate"] * count
    return {requests.post(url, json=body, timeout=60).status_code for url in urls}


def test_http_workers_serving_at_once_give_the_tokens_of_a_plain_server(
    workers: Server, expected: list[tuple[int, ...]]
) -> None:
    result = run_load(workers.url, BODIES, concurrency=CONCURRENCY)
    assert result.outputs == expected
    assert workers.log.read_text().count("Start multi-tokenizer worker process") == 2


def test_each_http_worker_tells_and_changes_the_policy(workers: Server) -> None:
    """With the key, for which SGLang itself does not ask here."""
    assert (
        requests.post(f"{workers.url}/c2t", json={"policy": "fixed"}, timeout=60).status_code == 401
    )
    for number in range(12):
        policy = ("fixed", "c2t")[number % 2]
        answer = requests.post(
            f"{workers.url}/c2t", json={"policy": policy}, headers=KEY, timeout=60
        )
        assert answer.status_code == 200, answer.text
        told = requests.get(f"{workers.url}/c2t", timeout=60)
        assert (told.status_code, told.json()["policy"]) == (200, policy)
        assert told.json()["switches"] == [number + 1]


def test_each_http_worker_refuses_what_would_end_the_scheduler(workers: Server) -> None:
    body = greedy("A", 4)
    body["sampling_params"].update(temperature=0.5, stop_regex="(")
    assert statuses(workers, body) == {400}
    assert statuses(workers, greedy("A", 4), 2) == {200}

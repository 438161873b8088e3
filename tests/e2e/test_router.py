"""Two ``--c2t`` servers behind SGLang's router, as one address for all clients."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests

from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import post_all, run_load
from tests.e2e.conftest import BODIES, CONCURRENCY, assert_counted, series, settings_of
from tests.e2e.router import Router, routing

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None,
        reason="SGLang's router is a package of its own: pip install sglang-router",
    ),
]

#: Longest that a request may take whose worker was killed.
END_SECONDS = 60.0


@dataclass(frozen=True)
class Fleet:
    """Workers by the name that their answers carry, and the router in front of them."""

    workers: dict[str, Server]
    router: Router


@pytest.fixture(scope="module")
def fleet(logs: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in ("one", "two"):
            flags = ("--c2t", "--c2t-policy", "c2t-plus", "--enable-metrics",
                     "--weight-version", name)  # fmt: skip
            launch = Launch(f"worker-{name}", (*speculative_flags("EAGLE3"), *flags))
            workers[name] = stack.enter_context(running(launch, logs))
        router = stack.enter_context(routing(list(workers.values()), logs))
        yield Fleet(workers, router)


def test_requests_through_the_router_are_answered_as_without_speculation_and_counted_where_served(
    fleet: Fleet, expected: list[tuple[int, ...]]
) -> None:
    before = {name: series(worker.url) for name, worker in fleet.workers.items()}
    routed = fleet.router.routed("generate")
    result = run_load(fleet.router.url, BODIES, concurrency=CONCURRENCY)
    assert result.outputs == expected
    served = {
        name: [a for a in result.answers if a.meta_info["weight_version"] == name]
        for name in fleet.workers
    }
    assert sum(map(len, served.values())) == len(BODIES)
    assert fleet.router.routed("generate") - routed == len(BODIES)
    for name, worker in fleet.workers.items():
        assert_counted(worker.url, before[name], served[name])


def test_each_worker_is_asked_and_changed_at_its_own_address(
    fleet: Fleet, expected: list[tuple[int, ...]]
) -> None:
    """The router does not pass /c2t on: a worker behind it would take it for a local client."""
    one, two = fleet.workers.values()
    before = settings(two)
    one.switch(policy="dyjoint", beta=0.2)
    assert settings(one)["policy"] == "dyjoint"
    assert settings(two) == before
    for method in ("GET", "POST"):
        asked = f"{fleet.router.url}/c2t"
        assert (
            requests.request(method, asked, json={"policy": "c2t"}, timeout=30).status_code == 404
        )
    fleet.router.flush_cache()
    assert run_load(fleet.router.url, BODIES, concurrency=CONCURRENCY).outputs == expected
    one.switch(policy=before["policy"])


def settings(server: Server) -> dict[str, Any]:
    return settings_of(server.url)


def test_an_opt_out_passes_the_router_on_completions_and_is_lost_on_generate(fleet: Fleet) -> None:
    """Which of SGLang's parameters the router knows is the router's; the guide says so."""
    for path, key, length, passes in (
        ("/v1/completions", "prompt", "max_tokens", True),
        ("/generate", "text", "max_new_tokens", False),
    ):
        sampling = {"temperature": 0, length: 24, "custom_params": {"c2t": False}}
        text = {key: BODIES[1]["text"]}
        body = {**text, **sampling} if passes else {**text, "sampling_params": sampling}
        full, drafts = _full_drafts(fleet, path, {"model": "demo", **body} if passes else body)
        assert drafts > 0
        assert (full == drafts) is passes, path


def _full_drafts(fleet: Fleet, path: str, body: dict[str, Any]) -> tuple[float, float]:
    """Drafts that were verified whole, and all, of this request alone."""
    names = "c2t:draft_stops_totalfull", "c2t:verifications_total"
    before = [series(worker.url) for worker in fleet.workers.values()]
    post_all(fleet.router.url, [(path, body)], concurrency=1)
    after = [series(worker.url) for worker in fleet.workers.values()]
    full, drafts = (
        sum(now[name] - then[name] for now, then in zip(after, before, strict=True))
        for name in names
    )
    return full, drafts


def test_a_worker_killed_under_load_costs_its_streams_and_no_other_answer(
    fleet: Fleet, logs: Path, expected: list[tuple[int, ...]]
) -> None:
    """The last test of this file, whose second worker is gone then.

    The router asks the other worker for what the dead one had not begun to answer. A stream that
    has begun it cannot go on with: its client sees a broken connection at once.
    """
    one, two = fleet.workers.values()
    fleet.router.flush_cache()
    with ThreadPoolExecutor(len(BODIES)) as pool:
        sent = [pool.submit(ask, fleet.router, n, stream=n % 2 == 0) for n in range(len(BODIES))]
        while sum(future.done() for future in sent) < 6:
            time.sleep(0.01)
        os.killpg(two.process.pid, signal.SIGKILL)
        ended = [future.result(timeout=2 * END_SECONDS) for future in sent]
    assert max(end.seconds for end in ended) < END_SECONDS
    for number, end in enumerate(ended):
        assert end.output_ids == expected[number] or (number % 2 == 0 and end.error), (number, end)
    assert any(end.error for end in ended), "no stream was under way"
    after = run_load(fleet.router.url, BODIES, concurrency=CONCURRENCY)
    assert after.outputs == expected
    assert {answer.meta_info["weight_version"] for answer in after.answers} == {"one"}
    assert one.process.poll() is None


@dataclass(frozen=True)
class End:
    """How a request ended: with an answer, or an error that its client sees."""

    seconds: float = 0.0
    output_ids: tuple[int, ...] | None = None
    error: str | None = None


def ask(router: Server, number: int, *, stream: bool) -> End:
    start = time.monotonic()
    body = {**BODIES[number], "stream": stream}
    try:
        reply = requests.post(f"{router.url}/generate", json=body, timeout=END_SECONDS)
        reply.raise_for_status()
        end = End(output_ids=streamed(reply.text) if stream else ids(reply.json()))
    except requests.Timeout:
        raise
    except requests.RequestException as error:
        end = End(error=str(error))
    return replace(end, seconds=time.monotonic() - start)


def ids(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(answer["output_ids"])


def streamed(text: str) -> tuple[int, ...]:
    """All token ids of a stream that came to its end."""
    *events, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert last == "[DONE]"
    return ids(json.loads(events[-1]))

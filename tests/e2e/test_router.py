"""Two ``--c2t`` servers behind SGLang's router, as one address for all clients."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import run_load
from tests.e2e.conftest import BODIES, CONCURRENCY, assert_counted, series, settings_of
from tests.e2e.router import routing

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None,
        reason="SGLang's router is a package of its own: pip install sglang-router",
    ),
]


@dataclass(frozen=True)
class Fleet:
    """Workers by the name that their answers carry, and the router in front of them."""

    workers: dict[str, Server]
    router: Server


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
    result = run_load(fleet.router.url, BODIES, concurrency=CONCURRENCY)
    assert result.outputs == expected
    served = {
        name: [a for a in result.answers if a.meta_info["weight_version"] == name]
        for name in fleet.workers
    }
    assert sum(map(len, served.values())) == len(BODIES)
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

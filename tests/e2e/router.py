"""SGLang's router in front of servers: it is a package of its own, and has no GPU to wait for."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import requests

from eval.server import Server, environment
from sglang_c2t.offline.servers import free_port, stop
from tests.forked_servers import start_as_users_do

READY_SECONDS = 60.0


@contextlib.contextmanager
def routing(workers: Sequence[Server], logs: Path, *flags: str) -> Iterator[Server]:
    """A router over ``workers``, which are taken in turn unless ``flags`` say otherwise."""
    with _running(logs, len(workers), "--worker-urls", *(w.url for w in workers), *flags) as router:
        yield router


@contextlib.contextmanager
def routing_apart(
    prefill: Server, bootstrap_port: int, decode: Server, logs: Path
) -> Iterator[Server]:
    """A router that has ``prefill`` read prompts, and ``decode`` answer them."""
    pair = ("--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url)
    soon = "--worker-startup-check-interval", "1"
    with _running(logs, 2, "--pd-disaggregation", *pair, *soon) as router:
        yield router


@contextlib.contextmanager
def _running(logs: Path, num_workers: int, *flags: str) -> Iterator[Server]:
    port = free_port()
    argv = [
        sys.executable, "-m", "sglang_router.launch_router",
        "--host", "127.0.0.1", "--port", str(port),
        # By default it binds one port, the same for all routers.
        "--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1",
        "--policy", "round_robin", *flags,
    ]  # fmt: skip
    process = start_as_users_do(argv, environment({}), logs / "router.log")
    router = Server(f"http://127.0.0.1:{port}", process, logs / "router.log")
    try:
        _wait_for(router, num_workers)
        yield router
    finally:
        stop(process)


def healthy(router: Server) -> set[str]:
    """Addresses of the workers that the router sends requests to."""
    told = requests.get(f"{router.url}/workers", timeout=30).json()
    return {worker["url"] for worker in told["workers"] if worker["is_healthy"]}


def _wait_for(router: Server, num_workers: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert router.process.poll() is None, router.log.read_text()[-2000:]
        with contextlib.suppress(requests.RequestException):
            if len(healthy(router)) == num_workers:
                return
        time.sleep(0.2)
    raise TimeoutError(router.log.read_text()[-2000:])

"""A server that is set wrong on purpose, and watched: what is wrong is named first.

Every cause is in tests/offline/test_advice.py; here the server's own numbers lead to one of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
import requests

from eval.prompts import demo_mix
from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.cli import main
from sglang_c2t.offline.client import greedy, run_load
from tests.e2e.conftest import REPOSITORY, series

AT_ONCE = 64
SECONDS = 60.0

CHAINS = speculative_flags("EAGLE3")


pytestmark = pytest.mark.extended


@contextlib.contextmanager
def loaded(name: str, logs: Path, *flags: str) -> Iterator[Server]:
    """A ``--c2t`` server that counts, with 64 requests at once that want long answers."""
    bodies = [greedy(prompt.text, 160) for prompt in demo_mix(320, seed=4)]
    for body in bodies:
        body["sampling_params"]["ignore_eos"] = True
    load: threading.Thread | None = None

    def serve(url: str) -> None:
        with contextlib.suppress(aiohttp.ClientError):  # its server ends before it does
            run_load(url, bodies * 20, concurrency=AT_ONCE)

    with running(Launch(name, ("--c2t", "--enable-metrics", *flags)), logs) as server:
        load = threading.Thread(target=serve, args=(server.url,))
        load.start()
        eventually(lambda: series(server.url).get("c2t:steps_total", 0) > 10)
        yield server
    load.join(timeout=60)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.3)


def advised(server: Server, capsys: pytest.CaptureFixture[str]) -> str:
    """Output of the command; pytest shows all of it where a test fails."""
    capsys.readouterr()
    assert main(["advise", server.url, "--seconds", "3", "--doctor"]) == 0
    text = capsys.readouterr().out
    print(text)
    return text


def first_cause(text: str) -> str:
    (line,) = re.findall(r"^1\. (.*)$", text, re.MULTILINE)
    return line


@pytest.fixture(scope="module")
def queued(logs: Path) -> Iterator[Server]:
    """SGLang's own limit under speculation, 48, below the load."""
    with loaded("queued", logs, *CHAINS, "--max-running-requests", "48") as server:
        yield server


def test_a_limit_below_the_load_is_named_with_what_more_would_bring(
    queued: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    eventually(lambda: bool(told(queued)["planner"][0]["best_plan_by_batch_size"]))
    text = advised(queued, capsys)
    cause = first_cause(text)
    assert re.match(r"queue: \d+ requests wait while 4\d run: no more than 48 may", cause)
    assert "--max-running-requests 48 -> 64 (queue)" in text or "add a replica" in text
    assert "by the planner's costs and survivals" in text


def told(server: Server) -> dict:
    return requests.get(f"{server.url}/c2t", timeout=60).json()


def top(server: Server, *flags: str) -> list[str]:
    """Its command line."""
    return [sys.executable, "-m", "sglang_c2t", "top", server.url, "--interval", "0.5", *flags]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}


def test_a_watched_server_is_a_line_an_interval_in_a_pipe(queued: Server) -> None:
    values: dict[str, str] = {}

    def full() -> bool:
        """Requests come and go in waves: between them few run."""
        once = subprocess.run(
            top(queued, "--once"), capture_output=True, text=True, timeout=60, env=ENVIRONMENT
        )
        assert (once.returncode, once.stderr) == (0, "")
        (line,) = once.stdout.splitlines()
        values.update(pair.split("=") for pair in line.split()[1:])
        return 40 <= float(values["running"]) <= 48

    eventually(full)
    assert values["policy"] == "auto"
    assert float(values["queued"]) > 0
    assert 1.0 <= float(values["accept_length"]) <= 6.0
    assert float(values["tokens/s"]) > 0
    assert float(values["measured_ms"]) > 0
    piped = subprocess.run(
        f"{' '.join(top(queued))} | head -2",
        shell=True, capture_output=True, text=True, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    assert piped.stderr == ""
    assert len(piped.stdout.splitlines()) == 2

"""A server that is set wrong on purpose, and watched: what is wrong is named first.

Every cause is in tests/offline/test_advice.py; here the server's own numbers lead to one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
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


class Terminal:
    """A command in a terminal of 80 columns and 24 lines."""

    def __init__(self, argv: list[str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
            os.execvpe(argv[0], argv, ENVIRONMENT)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str) -> None:
        """Wait until new output shows this text."""
        self.shown = ""
        deadline = time.monotonic() + SECONDS
        while text not in self.shown:
            self.shown += self._read(deadline).decode(errors="replace")

    def _read(self, deadline: float) -> bytes:
        ready, _, _ = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))
        assert ready, self.shown
        return os.read(self._fd, 4096)

    def ended(self) -> int:
        deadline = time.monotonic() + SECONDS
        with contextlib.suppress(OSError):  # the other side is gone
            while self._read(deadline):
                assert time.monotonic() < deadline, "it goes on"
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_a_watched_server_fills_a_terminal_and_is_switched_by_a_key(queued: Server) -> None:
    terminal = Terminal(top(queued))
    terminal.wait_for("tokens/s")
    terminal.type("4")
    terminal.wait_for("switch to c2t-plus?")
    terminal.type("n")
    terminal.wait_for("policy stays auto")
    assert told(queued)["policy"] == "auto"
    terminal.type("4")
    terminal.wait_for("switch to c2t-plus?")
    terminal.type("y")
    terminal.wait_for("policy c2t-plus from now on")
    assert told(queued)["policy"] == "c2t-plus"
    terminal.wait_for("not planned")
    terminal.type("q")
    assert terminal.ended() == 0


def test_ctrl_c_ends_watching_and_leaves_the_terminal_as_it_was(queued: Server) -> None:
    terminal = Terminal(top(queued))
    terminal.wait_for("tokens/s")
    terminal.type("\x03")
    assert terminal.ended() == 0

"""Start an SGLang server as a child process, wait until it answers, and stop it by its process id.
Servers are process groups of their own: a terminal's ctrl-C does not reach them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

STOP_SECONDS = 20.0


class ServerError(RuntimeError):
    """The server did not start or died; the message ends with the tail of its log."""


class Process(Protocol):
    """A server's main process; :class:`subprocess.Popen` is one."""

    @property
    def args(self) -> Any:
        """Its command line."""

    @property
    def pid(self) -> int:
        """Its id, which is that of its process group too."""

    def poll(self) -> int | None:
        """Return its exit code, ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; :class:`subprocess.TimeoutExpired` after ``timeout`` seconds."""


def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command line as a user does; its output goes to ``log``."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            argv, stdout=sink, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def stop(process: Process) -> None:
    """End the server's process group: first politely, then for sure, children included."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_SECONDS)


def free_port() -> int:
    """Return a free TCP port below those that the system gives to outgoing connections. A server
    binds its port half a minute later, and a connection could have taken one of theirs by then.
    """
    dice = random.SystemRandom()  # a seed of ``random`` must not make two servers' ports equal
    while True:
        port = dice.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until_ready(
    url: str, process: Process, log: Path, seconds: float, unwanted: threading.Event | None = None
) -> None:
    """Wait until the server generates. Raises :class:`ServerError` if it ends, if it takes more
    than so many ``seconds``, or once it is ``unwanted``.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if unwanted is not None and unwanted.is_set():
            raise ServerError("the server is not needed any more")
        if process.poll() is not None:
            raise ServerError(f"server ended with {process.poll()}\n{tail(log)}")
        with (
            contextlib.suppress(OSError, HTTPException),
            urllib.request.urlopen(f"{url}/health_generate", timeout=30),
        ):
            return
        time.sleep(0.3)
    raise ServerError(f"server not ready within {seconds:.0f} s\n{tail(log)}")


def tail(log: Path, num_lines: int = 30) -> str:
    """Return the last lines of a log, each cut to 400 characters."""
    lines = log.read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join(line[:400] for line in lines)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Make SIGTERM a KeyboardInterrupt inside the block, so that servers are stopped. Only the
    first: ``timeout`` sends it twice, and the second would interrupt the stopping.
    """

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Servers born of one process that has imported SGLang already.

A server is three processes or more, and each takes 20 seconds of a core to import SGLang: most of
what such a test costs. Here one process imports it as the launcher does, plugins included, and
every server is a fork of it, and so are the server's own processes. Command line, environment,
log, HTTP and the end are a real server's. What differs: a plugin's registration saw the
environment that all servers share, not what this one adds, SGLang's processes are forked where it
asks for new interpreters, those that plan take less time to price their steps, and nothing is
compiled, which takes a server seconds. Files of tests that say ``AS_USERS_DO`` do without.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest import mock

from eval import server

#: What SGLang looks up when a server starts, or :func:`_serve` for it. Other variables it may have
#: read on import, so that a server with one of these is started as users do.
READ_LATE = {
    "MC_FORCE_TCP", "MOONCAKE_PROTOCOL", "PYTHONPATH", "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "SGLANG_REQ_RUNNING_TIMEOUT",
    "SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_TEST_RETRACT",
}  # fmt: skip

_ONE_AT_A_TIME = threading.Lock()

start_as_users_do = server.start


class Forked:
    """A server's main process, as :class:`eval.server.Process`."""

    def __init__(self, argv: Sequence[str], process: ForkServerProcess) -> None:
        self.args = list(argv)
        self._process = process

    @property
    def pid(self) -> int:
        """Its id, which is that of its process group too."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; :class:`subprocess.TimeoutExpired` if it does not end in time."""
        self._process.join(timeout)
        ended = self.poll()
        if ended is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return ended


@functools.cache
def _fork_server() -> ForkServerContext:
    """It runs, in the environment that all servers share."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with mock.patch.dict(os.environ, server.environment({})):
        forkserver.ensure_running()
    return context


def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> server.Process:
    """In place of :func:`eval.server.start`."""
    shared = server.environment({})
    own = {name for name, value in env.items() if shared.get(name) != value}
    if argv[1] != "-m" or not own <= READ_LATE:
        return start_as_users_do(argv, env, log)
    with _ONE_AT_A_TIME:
        process = _fork_server().Process(target=_serve, args=(argv[2], argv[3:], dict(env), log))
        process.start()
    return Forked(argv, process)


def _serve(module: str, flags: Sequence[str], env: dict[str, str], log: Path) -> None:
    os.setsid()
    with log.open("wb") as sink:
        os.dup2(sink.fileno(), sys.__stdout__.fileno())
        os.dup2(sink.fileno(), sys.__stderr__.fileno())
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    _read_again()
    _price_briefly()
    _compile_nothing()
    # SGLang asks for new interpreters, which would import all of it again.
    multiprocessing.set_start_method("fork", force=True)
    with mock.patch("multiprocessing.set_start_method"):
        sys.argv[1:] = flags
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _read_again() -> None:
    """Set again what SGLang read from the environment on import."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    from sglang_c2t.srt import attach

    attach.write(scheduler, TEST_RETRACT=envs.SGLANG_TEST_RETRACT.get())


def _price_briefly() -> None:
    """Measure step costs briefly: costs decide plans, and no output."""
    from sglang_c2t.srt.draft import seeding

    seeding.SECONDS = 4.0


def _compile_nothing() -> None:
    """Run functions without ``torch.compile``."""
    import torch._dynamo

    torch._dynamo.config.disable = True

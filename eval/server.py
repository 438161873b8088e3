"""Start a real SGLang server as a child process, wait for it, stop it by its process id.

Knows nothing of what is sent to it. Loopback only; every wait has an end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from sglang_c2t.offline.servers import (
    Process,
    free_port,
    start,
    stop,
    wait_until_ready,
)

READY_SECONDS = 300.0

WEIGHTS = Path(__file__).parent / "demo_models" / "weights"
TARGET = WEIGHTS / "target"

#: Draft model of each speculative algorithm in the demo family.
DRAFTS = {
    "STANDALONE": WEIGHTS / "standalone",
    "EAGLE": WEIGHTS / "eagle",
    "EAGLE3": WEIGHTS / "eagle3",
}

#: A target of latent attention and experts, whose checkpoint has a draft layer: NEXTN.
MLA = WEIGHTS / "mla"

#: One process, no GPU, float32 so that greedy ties are real ties; pools fit a laptop.
CPU_FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "32768",
    "--max-running-requests", "64", "--sleep-on-idle",
)  # fmt: skip


class SwitchError(RuntimeError):
    """The server did not take the settings it was asked to take."""


@dataclass(frozen=True)
class Launch:
    """A server to start. ``flags`` are SGLang's own, in its spelling."""

    name: str
    flags: Sequence[str] = ()
    model: Path = TARGET
    env: Mapping[str, str] = field(default_factory=dict)
    control: bool = True
    """Whether a ``--c2t`` server without an admin key takes POST /c2t from this machine."""

    common: Sequence[str] = CPU_FLAGS
    """Put before ``flags``; none for a server that is not ours to set up."""

    def argv(self, port: int) -> list[str]:
        """The command line a user would type."""
        return [
            sys.executable, *self._launcher(), "--model-path", str(self.model),
            "--host", "127.0.0.1", "--port", str(port), *self.common, *self.flags,
        ]  # fmt: skip

    def _launcher(self) -> list[str]:
        """A machine without a GPU may have a stand-in for one, which has to be started first."""
        stock = "-m sglang.launch_server"
        return (stock if self.common else os.environ.get("EVAL_GPU_LAUNCHER", stock)).split()


def speculative_flags(
    algorithm: str,
    num_steps: int = 5,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    *,
    draft: Path | str | None = None,
) -> tuple[str, ...]:
    """Drafting of ``num_steps`` layers; with the demo draft of ``algorithm``, if none is named.

    NEXTN has none, as the target's checkpoint holds it. Chains by default; trees with ``topk``
    above 1, of up to ``num_draft_tokens`` nodes.
    """
    if draft is None:
        draft = DRAFTS.get(algorithm)
    return (
        "--speculative-algorithm", algorithm,
        *(() if draft is None else ("--speculative-draft-model-path", str(draft))),
        "--speculative-num-steps", str(num_steps),
        "--speculative-eagle-topk", str(topk),
        "--speculative-num-draft-tokens", str(num_draft_tokens or num_steps + 1),
    )  # fmt: skip


def gpu_environment() -> dict[str, str]:
    """Variables of a server on a GPU; the caller's own values win."""
    found = {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "8"}
    return {
        "SGLANG_USE_CPU_ENGINE": "0",
        "SGLANG_C2T_COUNTERS": "0",  # counting forwards is not free, and not under CUDA graphs
        **{name: os.environ.get(name, value) for name, value in found.items()},
    }


@dataclass(frozen=True)
class Server:
    """A running server. All calls raise on an HTTP error."""

    url: str
    process: Process
    log: Path

    def generate(self, timeout: float = 300.0, **body: Any) -> Any:
        """POST /generate; ``body`` is SGLang's request."""
        return self._post("/generate", timeout, json=body).json()

    def flush_cache(self) -> None:
        """Forget cached prefixes, so that one run does not serve the next.

        Waits for requests that still end, such as those whose client is gone.
        """
        self._post("/flush_cache?timeout=20", 30.0)

    def internal_state(self) -> dict[str, Any]:
        """The first scheduler's state in /server_info, with what plugins add."""
        response = requests.get(f"{self.url}/server_info", timeout=60)
        response.raise_for_status()
        state: dict[str, Any] = response.json()["internal_states"][0]
        return state

    def c2t_state(self) -> dict[str, Any]:
        """Our plugin's part of that state; {} without one."""
        state: dict[str, Any] = self.internal_state().get("c2t", {})
        return state

    def switch(self, **settings: Any) -> None:
        """Change a ``--c2t`` server; :class:`SwitchError` with what it answered."""
        reply = requests.post(f"{self.url}/c2t", json=settings, timeout=60)
        if not reply.ok:
            raise SwitchError(f"POST /c2t {settings}: {reply.status_code} {reply.text[:300]}")

    def processes(self) -> list[psutil.Process]:
        """Its main process and all below it."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def _post(self, path: str, timeout: float, **kwargs: Any) -> requests.Response:
        response = requests.post(f"{self.url}{path}", timeout=timeout, **kwargs)
        if not response.ok:
            text = f"POST {path}: {response.status_code} {response.text[:300]}"
            raise requests.HTTPError(text, response=response)
        return response


@contextlib.contextmanager
def running(
    launch: Launch, log_dir: Path, unwanted: threading.Event | None = None
) -> Iterator[Server]:
    """Start ``launch``, yield when it answers, stop it at the end of the block.

    A server that is ``unwanted`` before it answers is stopped, too: :class:`ServerError`.
    """
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / f"{launch.name}.log"
    process = start([*launch.argv(port), *_control(launch)], environment(launch.env), log)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(server.url, process, log, READY_SECONDS, unwanted)
        yield server
    finally:
        stop(process)


def run_to_exit(launch: Launch, timeout: float = READY_SECONDS) -> subprocess.CompletedProcess[str]:
    """Start a server that is expected to refuse, and return its exit code and output."""
    return subprocess.run(
        launch.argv(free_port()), capture_output=True, text=True, env=environment(launch.env),
        timeout=timeout,
        check=False,
    )  # fmt: skip


def _control(launch: Launch) -> tuple[str, ...]:
    """The flag that allows POST /c2t from this machine, unless the server has an admin key."""
    flags = launch.flags
    if launch.control and "--c2t" in flags and "--admin-api-key" not in flags:
        return ("--c2t-loopback-control",)
    return ()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, made fit for a server on the CPU, with ``extra``."""
    return {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_C2T_COUNTERS": "1",
        "HF_HUB_OFFLINE": "1",  # the demo models are local; no look-up at start
        # Several processes share few cores; a second thread each mostly waits for a core.
        "OMP_NUM_THREADS": "1",
        # It takes a server that is stopped for one that crashes, and would sleep for 5 seconds, and
        # for another 60 where a scheduler on a GPU fails.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        **extra,
    }

"""Prefill and decode in servers of their own, behind SGLang's router.

Keys travel with Mooncake over TCP, on this machine.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import differing, greedy, run_load
from sglang_c2t.offline.servers import free_port
from tests.e2e.conftest import BODIES, CONCURRENCY, assert_counted, run_beside_aborts, series
from tests.e2e.mixed_load import FLAGS, RETRACTING, LosslessnessSuite
from tests.e2e.router import routing_apart


def missing() -> str | None:
    """Name what these tests lack on this machine; ``None`` if they can run."""
    if importlib.util.find_spec("sglang_router") is None:
        return "SGLang's router is a package of its own: pip install sglang-router"
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        wheel = (
            "pip install mooncake-transfer-engine-non-cuda (140 MB), apt-get install libibverbs1"
        )
        return f"keys travel with Mooncake: {wheel} ({error})"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TCP = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}

TREES = {"topk": 4, "num_draft_tokens": 16}


@dataclass(frozen=True)
class Apart:
    """Two servers of one model, and the router in front of them."""

    prefill: Server
    decode: Server
    router: Server


@contextlib.contextmanager
def serving_apart(
    logs: Path, name: str, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[Apart]:
    """``env`` is the decode server's."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        common = ("--disaggregation-bootstrap-port", str(port), *flags)

        def start(mode: str, own: tuple[str, ...], env: Mapping[str, str]) -> Server:
            launch = Launch(
                f"{name}-{mode}", ("--disaggregation-mode", mode, *own, *common), env=env
            )
            server = stack.enter_context(running(launch, logs / name))
            # SGLang takes long to end what prefills or decodes only, when it is asked to.
            stack.callback(os.killpg, server.process.pid, signal.SIGKILL)
            return server

        prefill = start("prefill", (), TCP)
        # The default wants memory that a GPU can read.
        backup = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
        decode = start("decode", backup, {**TCP, **(env or {})})
        router = stack.enter_context(routing_apart(prefill, port, decode, logs / name))
        yield Apart(prefill, decode, router)
        assert prefill.process.poll() is decode.process.poll() is None


@pytest.fixture(scope="module")
def chains(logs: Path) -> Iterator[Apart]:
    """Start servers that plan, and read seeds."""
    flags = (*speculative_flags("EAGLE3"), "--c2t", "--enable-metrics", *FLAGS)
    with serving_apart(logs, "apart-chains", *flags) as servers:
        yield servers


def test_chains_planned_and_gated_give_the_outputs_of_a_server_without_speculation(
    chains: Apart, expected: list[tuple[int, ...]]
) -> None:
    """The decode server is asked and changed at its own address, and counts what it verified."""
    before = series(chains.decode.url)
    result = run_load(chains.router.url, BODIES, concurrency=CONCURRENCY)
    assert differing(result.outputs, expected) == []
    assert_counted(chains.decode.url, before, result.answers)
    assert chains.decode.c2t_state()["planner"]["steps"] > 50
    chains.decode.switch(policy="c2t")
    result = run_load(chains.router.url, BODIES, concurrency=CONCURRENCY)
    assert differing(result.outputs, expected) == []
    chains.decode.switch(policy="auto")


def test_requests_that_are_aborted_leave_the_others_untouched(
    chains: Apart, expected: list[tuple[int, ...]]
) -> None:
    assert differing(run_beside_aborts(chains.router).outputs, expected) == []


def test_a_seed_gives_the_tokens_of_a_server_without_speculation(
    chains: Apart, suite: LosslessnessSuite
) -> None:
    for bodies, wanted in zip(suite.drawn, suite.wanted[1:], strict=True):
        got = run_load(chains.router.url, bodies, concurrency=8)
        assert differing(got.outputs, wanted.outputs) == []
        assert sum(a.meta_info.get("spec_num_correct_drafts", 0) for a in got.answers) > 0


def test_an_opt_out_has_all_drafts_verified_from_the_first_on(chains: Apart) -> None:
    """It travels as SGLang's ``custom_params`` do: not from the router's ``/generate``."""
    chains.decode.switch(policy="dymax", beta=0.999)
    for body, whole in (({}, False), ({"custom_params": {"c2t": False}}, True)):
        full = "c2t:draft_stops_totalfull"
        before = series(chains.decode.url)
        sent = {"model": "demo", "prompt": BODIES[1]["text"], "max_tokens": 24, "temperature": 0}
        chains.router._post("/v1/completions", 60.0, json={**sent, **body})
        now = series(chains.decode.url)
        drafts = now["c2t:verifications_total"] - before["c2t:verifications_total"]
        assert drafts > 0
        assert (now[full] - before[full] == drafts) is whole
    chains.decode.switch(policy="auto")


def test_trees_retracted_on_the_decode_server_give_the_same_outputs(
    logs: Path, expected: list[tuple[int, ...]]
) -> None:
    """SGLang retracts every third step; its strict memory check ends the server on a leak."""
    flags = (*speculative_flags("EAGLE3", **TREES), "--c2t")
    with serving_apart(logs, "apart-trees", *flags, env=RETRACTING) as servers:
        result = run_load(servers.router.url, BODIES, concurrency=CONCURRENCY)
        assert sum(answer.meta_info["num_retractions"] for answer in result.answers) > 0
        assert differing(result.outputs, expected) == []
        servers.decode.switch(policy="c2t")
        result = run_load(servers.router.url, BODIES, concurrency=CONCURRENCY)
        assert differing(result.outputs, expected) == []
        assert run_load(servers.router.url, [greedy("A", 4)], concurrency=1).outputs

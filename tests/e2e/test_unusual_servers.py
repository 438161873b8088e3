"""The same equality where it is easiest to lose: two ranks, retraction, drafts of the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.server import Launch, running, speculative_flags
from sglang_c2t.offline.client import differing, run_load
from tests.e2e.conftest import (
    BODIES,
    REPOSITORY,
    GatedServer,
    own_policy_flags,
    replace_text,
    series,
    switchable_flags,
    tree_launch,
)
from tests.e2e.mixed_load import FLAGS, PROMPTS, RETRACTING, LosslessnessSuite
from tests.e2e.server_policies import FAILS, AnyJoint

PYTHONPATH = {"PYTHONPATH": str(REPOSITORY)}


def gated_launch(name: str, logs: Path, *flags: str, algorithm: str = "EAGLE3",
                 env: dict[str, str] | None = None) -> tuple[Launch, Path]:  # fmt: skip
    """A switchable ``--c2t`` server with further flags."""
    control = logs / f"gate-{name}"
    every = (*speculative_flags(algorithm), *switchable_flags(control, logs), *flags)
    return Launch(name, every, env={**PYTHONPATH, **(env or {})}), control


#: SGLang binds CPU ranks to NUMA nodes without this variable; a laptop has one node.
BIND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


TWO_RANKS = ("--tp-size", "2", *FLAGS)


@pytest.fixture(scope="module")
def suite_of_two_ranks(logs: Path) -> LosslessnessSuite:
    with running(Launch("tp2-plain", TWO_RANKS, env=BIND), logs) as server:
        return LosslessnessSuite.of(server, BODIES, PROMPTS)


def test_two_tensor_parallel_ranks_give_the_outputs_of_two_ranks_without_speculation(
    logs: Path, suite_of_two_ranks: LosslessnessSuite
) -> None:
    """Each rank grows other random trees, and its policy fails at other times.

    Unless rank 0's trees win, the ranks' rows differ and their next collective hangs. Recording
    leaves some drafts full, as only rank 0 knows.
    """
    flags = (*TWO_RANKS, *recording(logs / "tp2"))
    launch, control = tree_launch("tp2", logs, *flags, env={**BIND, **RETRACTING})
    with running(launch, logs) as server:
        replace_text(control, FAILS)
        suite_of_two_ranks.run(server)
        assert "was told to fail" in server.log.read_text()
        assert server.c2t_state()["recording"]["drafts_written"] > 0


def test_two_tensor_parallel_ranks_follow_one_plan(
    logs: Path, suite_of_two_ranks: LosslessnessSuite
) -> None:
    """Each rank measures other times; ranks with different plans would hang.

    First a planner draws plans and raises at other times in each rank.
    """
    control = logs / "tp2-planned"
    flags = own_policy_flags(AnyJoint, control, logs, {"control": str(control)})
    every = (*speculative_flags("EAGLE3"), *TWO_RANKS, *flags, "--enable-metrics")
    env = {**PYTHONPATH, **BIND, **RETRACTING}
    with running(Launch("tp2-planned", every, env=env), logs) as server:
        replace_text(control, FAILS)
        wanted = suite_of_two_ranks.wanted[0]
        result = run_load(server.url, BODIES, concurrency=6)
        assert differing(result.outputs, wanted.outputs) == []
        assert series(server.url)["c2t:plans_totalfailed"] > 10
        server.switch(policy="auto")
        suite_of_two_ranks.run(server)
        assert server.c2t_state()["planner"]["steps"] > 50
    lines = [line for line in server.log.read_text().splitlines() if "was told to fail" in line]
    assert len(lines) == 2, "one line per process"
    assert "the server verifies full drafts there" in lines[0]


def recording(logs: Path) -> tuple[str, ...]:
    """Record a fifth of the steps."""
    return ("--c2t-record", str(logs / "recorded"), "--c2t-record-share", "0.2")


def test_static_truncation_gives_the_same_outputs_at_full_width(
    logs: Path, suite: LosslessnessSuite
) -> None:
    """The fallback for backends that cannot pack: cut drafts, but every row is forwarded."""
    flags = ("--c2t-verify", "static", *FLAGS)
    launch, control = gated_launch("static", logs, *flags, env=RETRACTING)
    with running(launch, logs) as server:
        gated = GatedServer(server, "EAGLE3", control)
        replace_text(control, "random")
        suite.run(server)
        before = server.c2t_state()["counters"]
        result = gated.run("random")
        after = server.c2t_state()["counters"]
        assert differing(result.outputs, suite.wanted[0].outputs) == []
        verified = sum(a.meta_info.get("spec_verify_ct", 0) for a in result.answers)
        assert after["verify_rows"] - before["verify_rows"] == 6 * verified

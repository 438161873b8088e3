"""Real servers on the CPU, shared by as many tests as possible: starting one takes a while."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.prompts import demo_mix
from eval.server import DRAFTS, Launch, Server, running, speculative_flags
from sglang_c2t.client import Answer, LoadResult, greedy, run_load
from tests.e2e.server_policies import MODES, Switchable

REPOSITORY = Path(__file__).parents[2]
CONCURRENCY = 16

# Lengths differ so that requests leave the batch at different steps and others join.
BODIES: list[dict[str, Any]] = [
    greedy(prompt.text, max_new_tokens=(7, 64, 24, 1, 48, 2)[i % 6])
    for i, prompt in enumerate(demo_mix(36))
] + [
    greedy("A", 40),  # one prompt token
    greedy(" ".join(prompt.text for prompt in demo_mix(12, seed=1)), 40),  # chunked, several pages
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts servers."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def expected(logs: Path) -> list[tuple[int, ...]]:
    """Greedy outputs of BODIES without speculation, one request at a time."""
    with running(Launch("reference"), logs) as server:
        return run_load(server.url, BODIES, concurrency=1).outputs


@dataclass(frozen=True)
class GatedServer:
    """A ``--c2t`` server whose gate a test can switch while it runs."""

    server: Server
    algorithm: str
    control: Path

    def run(self, mode: str, bodies: list[dict[str, Any]] = BODIES,
            concurrency: int = CONCURRENCY) -> LoadResult:  # fmt: skip
        """Serve ``bodies`` under the gate ``mode``, from an empty cache."""
        assert mode in MODES or mode.startswith("{")
        self.control.write_text(mode)
        self.server.flush_cache()
        return run_load(self.server.url, bodies, concurrency=concurrency)


def switchable_flags(
    control: Path, config_dir: Path, measured: Sequence[str] = ()
) -> tuple[str, ...]:
    """``--c2t`` with the test policy; its options travel in a config file."""
    control.write_text("c2t")
    config = config_dir / f"{control.name}.json"
    config.write_text(json.dumps({
        "policy": f"{Switchable.__module__}:{Switchable.__name__}",
        "policy_options": {"control": str(control), "measured": list(measured)},
    }))  # fmt: skip
    return ("--c2t", "--c2t-config", str(config))


@pytest.fixture(scope="module", params=sorted(DRAFTS))
def gated(request: pytest.FixtureRequest, logs: Path) -> Iterator[GatedServer]:
    """One gated server per draft kind."""
    algorithm: str = request.param
    control = logs / f"gate-{algorithm}"
    flags = (*speculative_flags(algorithm), *switchable_flags(control, logs))
    launch = Launch(f"gated-{algorithm}", flags, env={"PYTHONPATH": str(REPOSITORY)})
    with running(launch, logs) as server:
        yield GatedServer(server, algorithm, control)


def verified_rows_reported(answers: list[Answer]) -> int:
    """Rows the target verified for these requests, from their own histograms."""
    return sum(
        length * count
        for answer in answers
        for length, count in enumerate(answer.meta_info.get("spec_cap_lens_histogram", []))
    )

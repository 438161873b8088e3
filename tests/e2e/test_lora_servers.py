"""Adapters (LoRA) of several tenants and the bare target in one batch: each request has the tokens
that a server without speculation gives it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests

from eval.prompts import demo_mix
from eval.server import Launch, running, speculative_flags
from sglang_c2t.offline.client import LoadResult, differing, run_load
from sglang_c2t.srt import compat
from tests import lora
from tests.e2e.conftest import (
    CONCURRENCY,
    REPOSITORY,
    TREE,
    GatedServer,
    own_policy_flags,
    run_beside_aborts,
)
from tests.e2e.mixed_load import RETRACTING, assert_drafted_well
from tests.e2e.server_policies import SwitchableTree


def bodies(number: int, **sampling: Any) -> list[dict[str, Any]]:
    """Requests of the bare target and of both adapters, neighbours with different ones."""
    return [
        {
            "text": prompt.text, "lora_path": (None, "left", "right")[n % 3],
            "sampling_params": {
                "temperature": 0, "max_new_tokens": (7, 40, 24, 1, 32, 2, 16)[n % 7],
                "sampling_seed": n, **sampling,
            },
        }
        for n, prompt in enumerate(demo_mix(number, seed=21))
    ]  # fmt: skip


GREEDY, SAMPLED = bodies(24), bodies(9, temperature=1.0, max_new_tokens=20)


@pytest.fixture(scope="module")
def adapted(logs: Path) -> tuple[str, ...]:
    """Flags of a server that has two adapters."""
    if not compat.verifies_adapters():
        pytest.skip("this SGLang serves no adapters beside drafts")
    paths = {name: logs / f"adapter-{name}" for name in ("left", "right")}
    for seed, folder in enumerate(paths.values()):
        lora.save(folder, seed)
    return (
        "--lora-paths", *(f"{name}={path}" for name, path in paths.items()),
        "--lora-backend", "torch_native", "--enable-deterministic-inference",
    )  # fmt: skip


@pytest.fixture(scope="module")
def wanted(adapted: tuple[str, ...], logs: Path) -> list[LoadResult]:
    """Answers without speculation, to both loads, and without adapters."""
    with running(Launch("lora-plain", adapted), logs) as server:
        bare = [body | {"lora_path": None} for body in GREEDY]
        return [run_load(server.url, load, concurrency=4) for load in (GREEDY, SAMPLED, bare)]


def test_adapters_change_what_is_answered(wanted: list[LoadResult]) -> None:
    """Most requests with an adapter get other tokens; else the tests below would show nothing."""
    greedy, _, bare = wanted
    found = differing(greedy.outputs, bare.outputs)
    asked = [n for n, body in enumerate(GREEDY) if body["lora_path"] is not None]
    assert set(found) <= set(asked)
    assert len(found) > len(asked) / 2


def launch(name: str, *flags: str, env: dict[str, str] | None = None, **shape: int) -> Launch:
    environment = {"PYTHONPATH": str(REPOSITORY), **(env or {})}
    return Launch(f"lora-{name}", (*speculative_flags("EAGLE3", **shape), *flags), env=environment)


def test_chains_keep_their_adapters_beside_aborts_and_behind_retraction(
    adapted: tuple[str, ...], wanted: list[LoadResult], logs: Path
) -> None:
    """Also one that is loaded while it serves. SGLang retracts every third step; its strict memory
    check ends the server on a leak.
    """
    with running(launch("chains", *adapted, "--c2t", env=RETRACTING), logs) as server:
        loaded = {"lora_name": "later", "lora_path": str(logs / "adapter-left")}
        requests.post(f"{server.url}/load_lora_adapter", json=loaded, timeout=60).raise_for_status()
        load = [*GREEDY, *(body | {"lora_path": "later"} for body in GREEDY[1::3])]
        expected = [*wanted[0].outputs, *wanted[0].outputs[1::3]]
        result = run_beside_aborts(server, load)
        assert differing(result.outputs, expected) == []
        assert sum(answer.meta_info["num_retractions"] for answer in result.answers) > 0
        assert_drafted_well(result)
        server.flush_cache()
        sampled = run_load(server.url, SAMPLED, concurrency=CONCURRENCY)
        assert differing(sampled.outputs, wanted[1].outputs) == []
        server.flush_cache()
    assert "ragged verification of chains" in server.log.read_text()


@pytest.mark.extended
def test_trees_of_more_adapters_than_fit_into_a_batch_keep_them(
    adapted: tuple[str, ...], wanted: list[LoadResult], logs: Path
) -> None:
    """Two places for two adapters and for none: batches change what stands in them."""
    control = logs / "tree-lora"
    flags = own_policy_flags(SwitchableTree, control, logs, {"control": str(control)})
    fewer = (*adapted, "--max-loras-per-batch", "2")
    with running(launch("trees", *fewer, *flags, **TREE), logs) as server:
        gated = GatedServer(server, "EAGLE3", control)
        for load, answers in zip((GREEDY, SAMPLED), wanted[:2], strict=True):
            assert differing(gated.run("random", load).outputs, answers.outputs) == []

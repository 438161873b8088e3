"""SGLang's CUDA path with and without ``--c2t``, on the emulated device: graphs and overlap on,
requests that come while others run, and streams as late as the program allows or in random order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from tests.emulated.emulator import Emulator
from tests.emulated.oracle import Oracle
from tests.emulated.serve import Served
from tests.emulated.servers import DRAFTS, NODES, SERVERS, STOCK
from tests.emulated.versions import OLDEST, RELEASE

GREEDY = [name for name in SERVERS if "seeded" not in name]

#: Servers whose parts other servers of this file run as well. Beside the oldest release, also those
#: whose steps use the same code of SGLang as in the newest.
RARELY = {"EAGLE3 chains, FlashInfer, any plan"}
if RELEASE is OLDEST:
    RARELY |= {"target alone, FA3", "EAGLE3 chains, FlashInfer, gated", "EAGLE3 trees, FlashInfer"}
    RARELY |= {name for name in GREEDY if "any plan" in name}


def servers(*words: str) -> list[Any]:
    """List the servers whose names have all of these words, as parameters of a test."""
    found = [name for name in GREEDY if all(word in name for word in words)]
    return [pytest.param(s, marks=pytest.mark.extended) if s in RARELY else s for s in found]


pytestmark = pytest.mark.server

#: Orders in which streams run ahead of the host, beside the latest one.
SEEDS = 1

#: Bytes that ours may hold beside stock: classifiers, lengths, graphs of other lengths.
MORE_MEMORY = 4 << 20

#: What happens to one request or to all, once per server.
ABORTED = 1
EVENTS: dict[str, dict[str, Any]] = {
    "aborted and retracted": {"aborted": ABORTED, "retracting": True},
    "asked": {"asked": True},
    "opted out": {"opted_out": 0},
    "switched": {"switched": ('{"beta": 0.999}',)},
    "switched and back": {"switched": ('{"policy": "c2t-plus"}', '{"policy": "auto"}')},
}


@dataclass(frozen=True)
class Runs:
    """Runs of one server."""

    orders: list[Served]  # as late as can be, and random ones
    events: dict[str, Served]


class Every(dict[str, Runs]):
    """Servers by name, each started once, at its first use."""

    def __init__(self, emulated: Emulator, oracle: Oracle) -> None:
        super().__init__()
        self._emulated, self._oracle = emulated, oracle

    def __missing__(self, server: str) -> Runs:
        self[server] = _serve(self._emulated, self._oracle, server)
        return self[server]


@pytest.fixture(scope="module")
def served(emulated: Emulator, oracle: Oracle) -> dict[str, Runs]:
    """All servers, or those of the tests that were chosen."""
    return Every(emulated, oracle)


def _serve(emulated: Emulator, oracle: Oracle, server: str) -> Runs:
    orders = [oracle.run(), *(oracle.run(ahead=seed) for seed in range(SEEDS))]
    events = [name for name in EVENTS if _happens(name, server)]
    happening = [oracle.run(**EVENTS[name]) for name in events]
    found = iter(emulated.try_to(oracle.case(server, *orders, *happening)))
    return Runs([next(found) for _ in orders], {name: next(found) for name in events})


#: Whose requests come and go only: SGLang's own, and drafts that are planned as these are.
UNEVENTFUL = (
    "target alone, FA3", STOCK["EAGLE3"], "STANDALONE chains, FA3, any plan",
    "EAGLE3 chains, FlashInfer, any plan", "EAGLE3 trees, FlashInfer",
)  # fmt: skip


def _happens(event: str, server: str) -> bool:
    if event in ("opted out", "switched"):
        return "gated" in server
    if event == "asked":
        return server in ("EAGLE3 chains, FA3", "EAGLE3 trees, FlashInfer, gated")
    if event == "switched and back":
        return server == "EAGLE3 chains, FA3"
    return server not in UNEVENTFUL


@pytest.mark.parametrize("server", servers())
def test_tokens_keys_and_values_are_those_of_the_models_in_every_order(
    served: dict[str, Runs], oracle: Oracle, server: str
) -> None:
    """The target's by transformers, a draft model's by SGLang alone, no step above its budget."""
    stock = _stock(served, server)
    for run in served[server].orders:
        assert oracle.wrong(server, run, stock) == []
    for name, run in served[server].events.items():
        # A step that retracts, changes its policy or is held to a pattern may wait. The keys of a
        # draft model after a constrained answer have no reference.
        counted, same = name == "opted out", name != "asked"
        assert oracle.wrong(server, run, stock if same else None, counted=counted) == [], name
    assert server in UNEVENTFUL or any(served[server].events["aborted and retracted"].retracted)


@pytest.mark.parametrize("server", servers("gated"))
def test_what_a_gate_lets_through_depends_on_no_order_and_on_no_attention(
    served: dict[str, Runs], server: str
) -> None:
    latest, twin = served[server].orders[0], server.replace("FA3", "FlashInfer")
    others = () if twin in RARELY else served[twin].orders
    for run in (*served[server].orders, *others):
        assert (run.verifications, run.rows) == (latest.verifications, latest.rows)


@pytest.mark.parametrize("server", servers("gated"))
def test_who_opts_out_has_all_drafts_verified_and_a_switch_is_heard(
    served: dict[str, Runs], server: str
) -> None:
    usual, events = served[server].orders[0], served[server].events
    width = NODES if "trees" in server else DRAFTS + 1
    own = events["opted out"]
    assert own.rows[0] == width * own.verifications[0] > usual.rows[0]
    assert sum(own.rows[1:]) < width * sum(own.verifications[1:])
    assert sum(events["switched"].rows) != sum(usual.rows)


def test_planner_in_graphs_takes_over_again_after_a_gate(served: dict[str, Runs]) -> None:
    events = served["EAGLE3 chains, FA3"].events
    planned = [step["planned"] for step in events["switched and back"].steps]
    runs = [planned[0], *(b for a, b in itertools.pairwise(planned) if a != b)]
    assert runs == [1, 0, 1]


@pytest.mark.parametrize("server", servers("any plan"))
def test_steps_in_graphs_are_uniform_and_planned_and_of_every_number_of_layers_or_none(
    served: dict[str, Runs], server: str
) -> None:
    """Trees, too: what a planner decides on a CPU it decides here."""
    steps = [step for run in served[server].orders for step in run.steps if step["planned"]]
    kinds = {(step["uniform"], step["layers"]) for step in steps}
    drafted = {(uniform, layers) for uniform in (0, 1) for layers in range(1, DRAFTS + 1)}
    assert kinds == {*drafted, (1, 0)}


def test_memory_of_ours_is_little_beside_stock(served: dict[str, Runs]) -> None:
    """Draft graphs of all lengths lie in the buffers of the longest."""
    chains = (s for s in GREEDY if "chains" in s and s not in RARELY)
    memory = {server: served[server].orders[0].memory for server in chains}
    for server, bytes_of in memory.items():
        print(server, bytes_of)
    for server in (s for s in memory if "--c2t" in SERVERS[s]):
        assert memory[server]["all"] <= 1.05 * memory[server]["whole drafts"], server
    stock = memory[STOCK["EAGLE3"]]["held"]
    for server in ("EAGLE3 chains, FA3", "EAGLE3 chains, FA3, gated"):
        assert memory[server]["held"] <= stock + MORE_MEMORY, server


def _stock(served: dict[str, Runs], server: str) -> Served | None:
    """SGLang's own, with the same draft model."""
    return next((served[name].orders[0] for kind, name in STOCK.items() if kind in server), None)

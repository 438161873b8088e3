"""SGLang's CUDA path with and without ``--c2t``, on the emulated device: graphs and overlap on,
requests that come while others run, and streams as late as the program allows or in random order.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulated.emulator import Emulator, emulator
from tests.emulated.oracle import Oracle
from tests.emulated.serve import Served
from tests.emulated.servers import SERVERS, STOCK

GREEDY = [name for name in SERVERS if "seeded" not in name]

pytestmark = pytest.mark.server

#: Orders in which streams run ahead of the host, beside the latest one.
SEEDS = 2

#: The request that is aborted in a last run.
ABORTED = 1


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with emulator(tmp_path_factory.mktemp("emulated")) as server:
        yield server


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def served(emulated: Emulator, oracle: Oracle) -> dict[str, list[Served]]:
    """All servers' runs: as late as can be, in random orders, and with an aborted request."""
    orders = [oracle.run(), *(oracle.run(ahead=seed) for seed in range(SEEDS))]
    runs = *orders, oracle.run(aborted=ABORTED)
    return {server: emulated.serve(oracle.case(server, *runs)) for server in GREEDY}


@pytest.mark.parametrize("server", GREEDY)
def test_tokens_keys_and_values_are_those_of_the_models_in_every_order(
    served: dict[str, list[Served]], oracle: Oracle, server: str
) -> None:
    """The target's by transformers, a draft model's by SGLang alone, no step above its budget."""
    stock = next((served[name][0] for kind, name in STOCK.items() if kind in server), None)
    for run in served[server][:-1]:
        assert oracle.wrong(server, run, stock) == []
    assert oracle.wrong(server, served[server][-1], stock, ABORTED) == []


@pytest.mark.parametrize("server", [s for s in GREEDY if "gated" in s])
def test_what_a_gate_lets_through_depends_on_no_order_and_on_no_attention(
    served: dict[str, list[Served]], server: str
) -> None:
    latest, twin = served[server][0], server.replace("FA3", "FlashInfer")
    for run in (*served[server][:-1], *served[twin][:-1]):
        assert (run.verifications, run.rows) == (latest.verifications, latest.rows)

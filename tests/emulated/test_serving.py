"""SGLang's CUDA path with and without ``--c2t``, on the emulated device: graphs and overlap on,
requests that come while others run, and everything as late as the program allows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulated.emulator import Emulator, emulator
from tests.emulated.oracle import Oracle
from tests.emulated.serve import Served
from tests.emulated.servers import SERVERS, STOCK

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with emulator(tmp_path_factory.mktemp("emulated")) as server:
        yield server


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def served(emulated: Emulator, oracle: Oracle) -> dict[str, Served]:
    return {server: emulated.serve(oracle.case(server, oracle.run()))[0] for server in SERVERS}


@pytest.mark.parametrize("server", SERVERS)
def test_tokens_keys_and_values_are_those_of_the_models(
    served: dict[str, Served], oracle: Oracle, server: str
) -> None:
    """The target's by transformers, a draft model's by SGLang alone, no step above its budget."""
    stock = next((served[name] for kind, name in STOCK.items() if kind in server), None)
    assert oracle.wrong(server, served[server], stock) == []


def test_what_a_gate_lets_through_does_not_depend_on_the_attention(
    served: dict[str, Served],
) -> None:
    one, other = served["EAGLE3 chains, FA3, gated"], served["EAGLE3 chains, FlashInfer, gated"]
    assert (one.verifications, one.rows) == (other.verifications, other.rows)

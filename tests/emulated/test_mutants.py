"""Mistakes in the CUDA path are seen on the emulated device: each of :mod:`mutants`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulated.emulator import Emulator, emulator
from tests.emulated.mutants import MUTANTS
from tests.emulated.oracle import Oracle
from tests.emulated.serve import Served
from tests.emulated.servers import STOCK

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with emulator(tmp_path_factory.mktemp("mutants")) as server:
        yield server


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def stock(emulated: Emulator, oracle: Oracle) -> Served:
    return emulated.serve(oracle.case(STOCK["EAGLE3"], oracle.run()))[0]


@pytest.fixture(scope="module")
def served(emulated: Emulator, oracle: Oracle) -> dict[str, Served]:
    """What became of each server as it is, by its name, and of each mutant."""
    found: dict[str, Served] = {}
    for server in {m.server for m in MUTANTS.values()}:
        late = [name for name, m in MUTANTS.items() if m.server == server and not m.at_start]
        runs = oracle.run(), *(oracle.run(mutant=name) for name in late)
        answers = emulated.try_to(oracle.case(server, *runs))
        found |= zip((server, *late), answers, strict=True)
    for name, broken in MUTANTS.items():
        if broken.at_start:
            (found[name],) = emulated.try_to(oracle.case(broken.server, oracle.run(), mutant=name))
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_seen(
    served: dict[str, Served], stock: Served, oracle: Oracle, name: str
) -> None:
    server, broken = MUTANTS[name].server, served[name]
    sound = served[server]
    assert oracle.wrong(server, sound, stock) == []
    seen = oracle.wrong(server, broken, stock)
    if not seen and broken.verifications != sound.verifications:
        seen = [f"{broken.verifications} verifications"]
    if not seen and broken.rows != sound.rows:
        seen = [f"{broken.rows} rows"]
    print(name, *seen, sep="\n  ")
    assert seen

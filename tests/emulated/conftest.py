"""Fixtures for the tests that start servers on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulated.emulator import Emulator, emulator
from tests.emulated.oracle import Oracle


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with emulator(tmp_path_factory.mktemp("emulated")) as server:
        yield server


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()

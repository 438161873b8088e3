"""Sampled requests on the emulated device: with a seed, the very tokens of the target alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated.emulator import Emulator
from tests.emulated.oracle import Oracle
from tests.emulated.serve import Served
from tests.emulated.servers import SERVERS

pytestmark = pytest.mark.server

#: How requests cut the target's distribution.
CUTS: list[dict[str, Any]] = [{}, {"top_k": 20, "top_p": 0.95}]

ALONE, *PLANNED = (name for name in SERVERS if name.endswith("seeded"))


@pytest.fixture(scope="module")
def alone(emulated: Emulator, oracle: Oracle) -> list[Served]:
    """By the target alone, one run for each cut."""
    return emulated.serve(oracle.case(ALONE, *(oracle.run(cut=cut) for cut in CUTS)))


@pytest.mark.parametrize("server", PLANNED)
def test_seeded_samples_are_those_of_the_target_alone(
    emulated: Emulator, oracle: Oracle, alone: list[Served], server: str
) -> None:
    served = emulated.serve(oracle.case(server, *(oracle.run(cut=cut) for cut in CUTS)))
    assert [run.outputs for run in served] == [run.outputs for run in alone]
    assert not any(_greedy(oracle, run) for run in alone)
    assert all(sum(run.verifications) < sum(map(len, run.outputs)) for run in served)


def _greedy(oracle: Oracle, run: Served) -> bool:
    """Whether each token is the likeliest."""
    each = enumerate(run.outputs)
    return all(oracle.answer(n, tokens).argmax(-1).tolist() == tokens for n, tokens in each)

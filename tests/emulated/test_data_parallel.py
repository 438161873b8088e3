"""Two ranks of data-parallel attention on the emulated device: each has requests of its own, and
all rows meet behind attention. Everything is done when it is launched: ranks that wait for each
other, hosts and devices, do so in one order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e import gathering_models
from tests.emulated.emulator import Emulator
from tests.emulated.oracle import Oracle
from tests.emulated.serve import Run, Served
from tests.emulated.servers import DRAFTS, TWO_RANKS
from tests.emulated.versions import OLDEST, RELEASE

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(RELEASE is OLDEST, reason="refused beside this SGLang"),
]

PLANNED, GATED = "EAGLE3 chains, FA3", "EAGLE3 chains, FA3, gated"
FLASHINFER, STATIC = "EAGLE3 chains, FlashInfer, gated", "EAGLE3 chains, FA3, static"


class Gathering(Oracle):
    """Oracle of the demo target as a model that gathers rows: same tokens, keys and values."""

    in_turn = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.flags = (
            "--model-path", str(folder), *TWO_RANKS, "--dp-size", "2",
            "--enable-dp-attention",
        )  # fmt: skip

    def one_rank_first(self) -> Run:
        """The second rank has nothing to do until its two requests come."""
        run = self.run()
        requests = list(run.requests)
        requests[1], requests[3] = (replace(requests[n], joins=8) for n in (1, 3))
        return replace(run, requests=tuple(requests))


@pytest.fixture(scope="module")
def gathering(tmp_path_factory: pytest.TempPathFactory) -> Gathering:
    folder = tmp_path_factory.mktemp("gathering") / "target"
    gathering_models.save(folder)
    return Gathering(folder)


def _served(emulated: Emulator, gathering: Gathering, server: str, run: Run) -> Served:
    """Serve a run and assert that its results are right."""
    (served,) = emulated.serve(gathering.case(server, run))
    assert gathering.wrong(server, served, None, counted=False) == []
    return served


@pytest.mark.parametrize(
    "server", [PLANNED, FLASHINFER, pytest.param(STATIC, marks=pytest.mark.extended)]
)
def test_ranks_with_requests_of_their_own_and_with_none_keep_what_one_would(
    emulated: Emulator, gathering: Gathering, server: str
) -> None:
    """Every step replays graphs, those beside an idle rank as well."""
    run = _served(emulated, gathering, server, gathering.one_rank_first())
    assert sum(run.verifications) < sum(map(len, run.outputs)), "nothing was drafted right"
    assert sum(run.rows) < (DRAFTS + 1) * sum(run.verifications), "nothing was cut"
    for step in run.steps:
        # Drafts of one layer, which the planner may choose, come out of draft extend's graph.
        assert step["replays"] == 2 + (step["drafted"] > 2), step
    whole = [step["forwarded"] == (DRAFTS + 1) * step["batch"] for step in run.steps]
    assert all(whole) == (server == STATIC)


def test_requests_that_leave_lose_their_place_or_ask_for_more_leave_the_others_as_they_were(
    emulated: Emulator, gathering: Gathering
) -> None:
    """Requests of both ranks: one is aborted, one opts out, two have to match patterns, two want
    log-probabilities, and all are retracted.
    """
    run = gathering.run(aborted=1, opted_out=0, asked=True, retracting=True)
    served = _served(emulated, gathering, GATED, run)
    assert sum(served.retracted) > 0

"""Two servers on the emulated device, and two runs of each.

Small on purpose: it runs beside the older SGLang that we serve (`make parity-old`), where there is
no time for the rest of ``tests/emulated``.
"""

from __future__ import annotations

import pytest

from tests.emulated.emulator import Emulator
from tests.emulated.oracle import Oracle
from tests.emulated.serve import Served
from tests.emulated.servers import DRAFTS, NODES
from tests.emulated.versions import OLDEST, RELEASE

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(RELEASE is not OLDEST, reason="test_serving.py does this and more"),
]

#: By name, with the most rows of a request.
WIDTHS = {"EAGLE3 chains, FA3, gated": DRAFTS + 1, "EAGLE3 trees, FlashInfer, gated": NODES}
ABORTED = 1


@pytest.fixture(scope="module")
def served(emulated: Emulator, oracle: Oracle) -> dict[str, list[Served]]:
    """As late as can be, with an abort; and in random order, where requests lose their places."""
    runs = oracle.run(aborted=ABORTED), oracle.run(ahead=0, retracting=True)
    return {server: emulated.try_to(oracle.case(server, *runs)) for server in WIDTHS}


@pytest.mark.parametrize("server", WIDTHS)
def test_tokens_keys_and_values_are_those_of_the_models(
    served: dict[str, list[Served]], oracle: Oracle, server: str
) -> None:
    """The target's by transformers. The draft model's are those of the other server, whose
    attention and drafts are of another kind.
    """
    late, retracted = served[server]
    (twin,) = (runs[1] for other, runs in served.items() if other != server)
    assert not twin.error, twin.error
    assert oracle.wrong(server, late, twin) == []
    assert oracle.wrong(server, retracted, twin, counted=False) == []
    assert any(retracted.retracted)
    # Drafts were pruned, and not all of them away.
    assert sum(late.verifications) < sum(late.rows) < WIDTHS[server] * sum(late.verifications)

"""Rare configurations on the emulated device: ranks, bfloat16, pages, recording."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_c2t.classifier.recording import Recording, read_recording
from tests.e2e import vision_models
from tests.emulated import latent_models
from tests.emulated.emulator import Emulator
from tests.emulated.mutants import ADAPTED as WITH_ADAPTERS
from tests.emulated.mutants import MUTANTS
from tests.emulated.oracle import TOKENS, Adapted, Latent, Oracle, Seeing
from tests.emulated.servers import DRAFTS, LATENT, SHORTEST, UNUSUAL
from tests.emulated.versions import OLDEST, RELEASE

pytestmark = pytest.mark.server

#: With a target that sees.
SEEING = "EAGLE3 chains, FA3", "EAGLE3 trees, FlashInfer, gated"
CHAINS, TREES = (name for name in UNUSUAL if name.endswith("recorded"))

#: Everything that happens to the requests of a server, at once.
EVENTFUL: dict[str, Any] = {"aborted": 1, "asked": True, "retracting": True}


def rarely(*values: str) -> Any:
    """Parameters that `make extended` runs: other tests show their parts."""
    return pytest.param(*values, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    "server",
    [rarely("EAGLE3 chains, FA3, two ranks"), "EAGLE3 trees, FlashInfer, gated, two ranks"],
)
def test_two_ranks_keep_what_one_would(emulated: Emulator, oracle: Oracle, server: str) -> None:
    (run,) = emulated.serve(oracle.case(server, oracle.run(ahead=0)))
    assert oracle.wrong(server, run, None) == []
    assert sum(run.verifications) < sum(map(len, run.outputs)), "nothing was drafted right"


def test_shortest_command_on_hopper_packs_chains(emulated: Emulator, oracle: Oracle) -> None:
    """SGLang chooses FA3, and then trees, which no attention but FlashInfer's verifies packed."""
    (run,) = emulated.serve(oracle.case(SHORTEST, oracle.run(ahead=0)))
    assert oracle.wrong(SHORTEST, run, None) == []
    assert max(step["drafted"] for step in run.steps) == 6
    assert any(step["forwarded"] < step["batch"] * 6 for step in run.steps)


@pytest.mark.parametrize("server", [name for name in UNUSUAL if "bfloat16" in name])
def test_tokens_keys_and_values_are_the_models_to_rounding(
    emulated: Emulator, oracle: Oracle, server: str
) -> None:
    """Requests come; and streams run ahead while requests are aborted, constrained, retracted."""
    runs = oracle.run(), oracle.run(ahead=0, **EVENTFUL)
    for run in emulated.serve(oracle.case(server, *runs)):
        assert oracle.wrong(server, run, None) == []
        assert sum(run.verifications) < sum(map(len, run.outputs)), "nothing was drafted right"


#: Mistakes in packed rows that a first batch can show, and where.
WRONG_ROWS = (
    ("EAGLE3 chains, FA3", "attention forgets the rows themselves"),
    ("EAGLE3 chains, FlashInfer, gated", "rows are written one place behind"),
)


@pytest.mark.parametrize(("server", "name"), WRONG_ROWS)
def test_a_server_that_packs_wrongly_sees_it_at_its_start_and_verifies_whole_drafts(
    emulated: Emulator, oracle: Oracle, server: str, name: str
) -> None:
    """SGLang's own graphs serve right answers."""
    (run,) = emulated.try_to(oracle.case(server, oracle.run(), mutant=name))
    assert oracle.wrong(server, run, None, counted=False) == []
    for step in run.steps:
        assert step["forwarded"] == step["batch"] * (DRAFTS + 1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = tmp_path_factory.mktemp("seeing")
    vision_models.save(folder)
    return Seeing(folder)


@pytest.mark.parametrize("server", [rarely(SEEING[0]), SEEING[1]])
def test_packed_rows_are_rotated_as_their_pictures_say(
    emulated: Emulator, seeing: Seeing, server: str
) -> None:
    """M-RoPE: two of four requests count otherwise behind a picture, each in its own way."""
    runs = (
        seeing.run(ahead=0, retracting=True),
        seeing.run(mutant="rows are rotated as whole drafts are"),
    )
    run, broken = emulated.try_to(seeing.case(server, *runs))
    assert seeing.wrong(server, run, None, counted=False) == []
    assert sum(run.verifications) < sum(map(len, run.outputs)), "nothing was drafted right"
    assert seeing.wrong(server, broken, None, counted=False) != []


@pytest.mark.skipif(RELEASE is OLDEST, reason="it serves no adapters beside drafts")
def test_packed_rows_have_the_adapters_of_their_requests(
    emulated: Emulator, tmp_path: Path
) -> None:
    """Two adapters, and none, in one batch, by SGLang's usual LoRA kernels."""
    server, adapted = "EAGLE3 chains, FA3", Adapted(tmp_path)
    mistakes = [name for name, m in MUTANTS.items() if m.server == WITH_ADAPTERS]
    runs = adapted.run(ahead=0), *(adapted.run(mutant=name) for name in mistakes)
    run, *broken = emulated.try_to(adapted.case(server, *runs))
    assert adapted.wrong(server, run, None, counted=False) == []
    assert sum(run.verifications) < sum(map(len, run.outputs)), "nothing was drafted right"
    for name, one in zip(mistakes, broken, strict=True):
        seen = adapted.wrong(server, one, None, counted=False)
        print(name, *seen, sep="\n  ")
        assert seen, name


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Latent:
    folder = tmp_path_factory.mktemp("latent") / "target"
    latent_models.save(folder)
    return Latent(folder)


@pytest.mark.skipif(RELEASE is OLDEST, reason="nobody wrote references of its experts")
@pytest.mark.parametrize(
    "server", [name if name.endswith("gated") else rarely(name) for name in LATENT]
)
def test_packed_rows_attend_to_latents_as_the_model_does(
    emulated: Emulator, latent: Latent, server: str
) -> None:
    """MLA with experts and its own draft layer: planned, in graphs, and without where more run."""
    late = [name for name, mutant in MUTANTS.items() if mutant.server == server]
    events = [latent.run(retracting=True)] if late else []
    runs = latent.run(ahead=0), *events, *(latent.run(mutant=name) for name in late)
    run, *others = emulated.try_to(latent.case(server, *runs))
    if "few in graphs" in server:  # drafts outside of graphs compile their gate when they come
        run = replace(run, compiled=[])
    assert latent.wrong(server, run, None) == []
    assert sum(run.verifications) < sum(map(len, run.outputs)), "nothing was drafted right"
    assert any(step["forwarded"] < step["batch"] * (DRAFTS + 1) for step in run.steps)
    for other in others[: len(events)]:
        assert latent.wrong(server, other, None, counted=False) == []
    for broken in others[len(events) :]:
        print(*latent.wrong(server, broken, None, counted=False), sep="\n  ")
        assert latent.wrong(server, broken, None, counted=False) != []


@pytest.mark.extended
def test_a_recording_says_the_same_of_chains_and_of_the_likeliest_nodes_of_trees(
    emulated: Emulator, oracle: Oracle, tmp_path: Path
) -> None:
    """With other attention, pages and shapes, of each token that was served."""
    found = {}
    for server in (CHAINS, TREES):
        folder = tmp_path / server
        (run,) = emulated.serve(oracle.case(server, oracle.run(), more=(str(folder),)))
        # Drafts outside of graphs may compile a kernel when the first one is recorded.
        assert oracle.wrong(server, replace(run, compiled=[]), None) == []
        # The first token is the prefill's. The older release drafts once more behind the last one,
        # as it hears too late that it was the last.
        assert run.verifications == [TOKENS - 1] * len(oracle.prompts)
        recording, drafts = read_recording(folder), TOKENS - 1 + (RELEASE is OLDEST)
        assert recording.num_drafts == drafts * len(oracle.prompts)
        found[server] = _likeliest(recording)
    chains, trees = found.values()
    assert len(chains) == drafts * len(oracle.prompts) * DRAFTS
    # Of a deeper node trees may have likelier ones elsewhere.
    assert trees.keys() <= chains.keys()
    assert len(trees) > len(chains) / 2
    assert sum(bool(chains[node][-1]) for node in trees) > len(trees) / 4, "few were accepted"
    for node, values in trees.items():
        assert torch.allclose(values, chains[node], rtol=1e-3, atol=1e-4), node


def _likeliest(recording: Recording) -> dict[tuple[int, int, int], Tensor]:
    """Measurements and acceptance of the likeliest path, by prompt, position and depth."""
    nodes, found, behind = recording.nodes, {}, {-1}
    columns = [nodes[name].float() for name in ("prob", "joint", "entropy", "margin", "accept")]
    values = torch.stack(columns, dim=1)
    first, last = 0, -1
    for number, (draft, parent, rank, depth) in enumerate(
        zip(*(nodes[name].tolist() for name in ("draft", "parent", "rank", "depth")), strict=True)
    ):
        if draft != last:
            first, last, behind = number, draft, {-1}
        if rank == 0 and parent in behind:
            behind = {number - first}
            prompt, position = (int(recording.drafts[n][draft]) for n in ("prompt", "position"))
            found[prompt, position, depth] = values[number]
    return found

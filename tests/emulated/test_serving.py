"""SGLang's CUDA path with and without ``--c2t``, on the emulated device: graphs and overlap on,
requests that come while others run, and everything as late as the program allows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.prompts import demo_mix
from eval.server import TARGET, speculative_flags
from tests.emulated.emulator import Emulator, emulator
from tests.emulated.serve import Case, Request

pytestmark = pytest.mark.server

TOKENS = 16
JOINS = (0, 0, 4, 7)
COMMON = (
    "--model-path", str(TARGET), "--dtype", "float32", "--max-total-tokens", "4096",
    "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4", "--skip-tokenizer-init",
    "--mm-feature-transport", "cpu", "--grammar-backend", "none", "--disable-prefill-cuda-graph",
    "--random-seed", "1", "--mem-fraction-static", "0.5", "--watchdog-timeout", "100000",
)  # fmt: skip
FLASHINFER = ("--attention-backend", "flashinfer")
CHAINS = {kind: speculative_flags(kind, 3) for kind in ("EAGLE3", "STANDALONE")}
TREES = speculative_flags("EAGLE3", 3, 4, 8)

SERVERS: dict[str, tuple[str, ...]] = {
    "target alone, FA3": (),
    "EAGLE3 chains, FA3, stock": CHAINS["EAGLE3"],
    "EAGLE3 chains, FA3": (*CHAINS["EAGLE3"], "--c2t"),
    "EAGLE3 chains, FA3, gated": (*CHAINS["EAGLE3"], "--c2t", "--c2t-policy", "c2t"),
    "STANDALONE chains, FA3": (*CHAINS["STANDALONE"], "--c2t"),
    "EAGLE3 chains, FlashInfer": (*CHAINS["EAGLE3"], *FLASHINFER, "--c2t"),
    "EAGLE3 trees, FlashInfer": (*TREES, *FLASHINFER, "--c2t"),
    "EAGLE3 trees, FlashInfer, gated": (*TREES, *FLASHINFER, "--c2t", "--c2t-policy", "c2t"),
}

#: What a decode step may count at most outside of graphs, while requests come and go. Pageable
#: copies are SGLang's own. Plans go by the clock, so that nothing is said of servers that plan.
COUNTED = ("launches", "H2D", "D2H", "pageable", "syncs", "event waits", "replays")
BUDGET: dict[str, tuple[int, ...]] = {
    "target alone, FA3": (40, 1, 1, 0, 0, 1, 1),
    "EAGLE3 chains, FA3, stock": (70, 3, 2, 2, 0, 1, 3),
    "EAGLE3 chains, FA3, gated": (120, 3, 4, 2, 0, 4, 3),
    "EAGLE3 trees, FlashInfer, gated": (170, 9, 6, 2, 2, 4, 3),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with emulator(tmp_path_factory.mktemp("emulated")) as server:
        yield server


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tuple(tokenizer(p.text)["input_ids"][:24]) for p in demo_mix(len(JOINS), seed=3)]


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """By transformers, one token after the other."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs


def case(server: str, prompts: list[tuple[int, ...]]) -> Case:
    requests = (
        Request(ids, joins, max_new_tokens=TOKENS)
        for ids, joins in zip(prompts, JOINS, strict=True)
    )
    return Case((*COMMON, *SERVERS[server]), tuple(requests))


@pytest.mark.parametrize("server", SERVERS)
def test_outputs_are_those_of_the_target_and_no_step_exceeds_its_budget(
    emulated: Emulator, prompts: list[tuple[int, ...]], expected: list[list[int]], server: str
) -> None:
    served = emulated.serve(case(server, prompts))
    assert served.outputs == expected
    for what, allowed in zip(COUNTED, BUDGET.get(server, ()), strict=False):
        assert max(step.get(what, 0) for step in served.steps) <= allowed, (what, served.sites)

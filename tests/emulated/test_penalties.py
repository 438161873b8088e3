"""Penalties and minimum lengths on the emulated device, with graphs and overlap on.

SGLang's host learns of a step's tokens when the next one runs already, and counts too few.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulated.emulator import Emulator
from tests.emulated.oracle import JOINS, Oracle
from tests.emulated.serve import Request, Run, Served
from tests.emulated.versions import OLDEST, RELEASE

pytestmark = pytest.mark.server

TOKENS = 24

#: What the requests ask for, one of them for nothing.
ASKED: list[dict[str, Any]] = [
    {"frequency_penalty": 0.6, "min_new_tokens": 12},
    {"presence_penalty": 1.0, "repetition_penalty": 1.3},
    {},
    {"frequency_penalty": -0.2, "presence_penalty": 0.5, "repetition_penalty": 0.9},
]

#: What a step may not do oftener than one without penalties. In the older release SGLang's own
#: penalizers wait for the device, and what they give is not used.
WAITS = ("event waits",) if RELEASE is OLDEST else ("syncs", "event waits", "pageable")

GREEDY = "EAGLE3 chains, FA3", "EAGLE3 trees, FlashInfer, gated", "EAGLE3 chains, FA3, static"


def requests(oracle: Oracle, stop: int) -> tuple[Request, ...]:
    """All prompts, with penalties; one may not say ``stop`` before its minimum."""
    asked = [{**each} for each in ASKED]
    asked[0]["stop_token_ids"] = [stop]
    return tuple(
        Request(
            ids, joins, max_new_tokens=TOKENS, logprobs=n in (0, 3),
            sampling={"temperature": 0.0, **asked[n]},
        )
        for n, (ids, joins) in enumerate(zip(oracle.prompts, JOINS, strict=True))
    )  # fmt: skip


def penalised(logits: Tensor, said: list[int], params: dict[str, Any], eos: int) -> Tensor:
    """[V] behind the tokens that were ``said``: one token at a time, in plain numbers."""
    logits = logits.clone()
    for token in set(said):
        logits[token] -= params.get("frequency_penalty", 0.0) * said.count(token)
        logits[token] -= params.get("presence_penalty", 0.0)
    if len(said) < params.get("min_new_tokens", 0):
        logits[[*params.get("stop_token_ids", ()), eos]] = -torch.inf
    for token in set(said):
        by = params.get("repetition_penalty", 1.0)
        logits[token] *= by if logits[token] < 0 else 1 / by
    return logits


def wrong(oracle: Oracle, run: Served) -> list[str]:
    """List what is wrong with a greedy run."""
    found = []
    eos = oracle.tokenizer.eos_token_id
    for number, (request, tokens) in enumerate(zip(run.requests, run.outputs, strict=True)):
        prompt = oracle.prompts[number]
        behind = oracle.read((*prompt, *tokens)).logits[len(prompt) - 1 :]
        each = [
            penalised(logits, tokens[:at], request.sampling, eos)
            for at, logits in enumerate(behind)
        ]
        if [int(logits.argmax()) for logits in each] != tokens:
            found.append(f"tokens of request {number}: {tokens}")
        if len(tokens) != TOKENS:
            found.append(f"{len(tokens)} tokens of request {number}")
        if request.logprobs:
            told = [float(x.log_softmax(-1)[t]) for x, t in zip(each, tokens, strict=True)]
            if not torch.allclose(
                torch.tensor(run.logprobs[number]), torch.tensor(told), atol=1e-3
            ):
                found.append(f"log-probabilities of request {number}")
    return found


@pytest.fixture(scope="module")
def stop(oracle: Oracle) -> int:
    """A token that the first prompt's answer would hold early."""
    ids = oracle.prompts[0]
    for _ in range(4):
        ids = (*ids, int(oracle.read((*ids, 0)).logits[-1].argmax()))
    return ids[-1]


@pytest.mark.parametrize("server", GREEDY)
def test_greedy_tokens_are_those_of_penalties_applied_token_by_token(
    emulated: Emulator, oracle: Oracle, stop: int, server: str
) -> None:
    """As late as can be, and retracted in a random order; no step waits oftener than without."""
    asked = requests(oracle, stop)
    runs = Run(asked), Run(asked, ahead=0, retracting=True), oracle.run()
    run, retracted, usual = emulated.serve(oracle.case(server, *runs))
    assert wrong(oracle, retracted) == []
    assert any(retracted.retracted)
    assert wrong(oracle, run) == []
    assert sum(run.verifications) < sum(map(len, run.outputs)), "nothing was drafted right"
    assert stop not in run.outputs[0][: ASKED[0]["min_new_tokens"]]
    for what in WAITS:
        most = max(step.get(what, 0) for step in run.steps)
        assert most <= max(step.get(what, 0) for step in usual.steps), what

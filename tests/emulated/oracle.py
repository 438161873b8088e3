"""What a run on the emulated device must come to, by transformers and by SGLang without the plugin.

Keys and values tell more than tokens: a wrong mask, position or slot changes them in each layer
behind the first, where the likeliest token often stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.prompts import demo_mix
from eval.server import TARGET
from tests.emulated.serve import Case, Request, Run, Served, sketch
from tests.emulated.servers import COMMON, SERVERS
from tests.emulated.versions import COUNTED, RELEASE

TOKENS = 16
JOINS = (0, 0, 4, 7)
ABORTED_AT = 4

#: Rounding in what :func:`sketch` gives, whose numbers are in the tens.
ROUNDING = 1e-3

#: Of a request's last tokens some are not kept: the one that nobody was forwarded behind, and where
#: pairs of tokens are kept the one before.
NOT_KEPT = 2


@dataclass(frozen=True)
class Answer:
    """What a request must come to."""

    tokens: list[int]
    kept: Tensor
    """[L, n] :func:`sketch` of what the target keeps."""


class Oracle:
    """The answers to four prompts."""

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Of 24 tokens each."""
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        return [tuple(tokenizer(p.text)["input_ids"][:24]) for p in demo_mix(len(JOINS), seed=3)]

    @cached_property
    def answers(self) -> list[Answer]:
        """By transformers, one token after the other."""
        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # several of so small a model wait for each other, on busy cores
        try:
            return [self._answer(model, prompt) for prompt in self.prompts]
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def _answer(self, model: torch.nn.Module, prompt: tuple[int, ...]) -> Answer:
        ids = list(prompt)
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        layers = model(torch.tensor([ids])).past_key_values.layers
        kept = sketch([(x.keys[0].transpose(0, 1), x.values[0].transpose(0, 1)) for x in layers])
        return Answer(ids[len(prompt) :], kept)

    def run(
        self,
        *,
        aborted: int | None = None,
        opted_out: int | None = None,
        cut: dict[str, Any] | None = None,
        **how: Any,
    ) -> Run:
        """All prompts, some of which join later.

        Args:
            aborted: This one is, once it has some tokens.
            opted_out: This one is.
            cut: They are sampled, each by its own seed, from the target's distribution cut so.
            how: See :class:`Run`.
        """
        requests = (
            Request(
                ids,
                joins,
                ABORTED_AT if number == aborted else None,
                number == opted_out,
                {"temperature": 0.0} if cut is None else {**_seeded(number), **cut},
                TOKENS,
            )
            for number, (ids, joins) in enumerate(zip(self.prompts, JOINS, strict=True))
        )
        return Run(tuple(requests), **how)

    def case(self, server: str, *runs: Run, mutant: str = "") -> Case:
        """One of :data:`SERVERS`, and its runs."""
        return Case((*COMMON, *SERVERS[server]), runs, mutant)

    def wrong(
        self,
        server: str,
        served: Served,
        stock: Served | None,
        aborted: int | None = None,
        *,
        counted: bool = True,
    ) -> list[str]:
        """What is, in words.

        Args:
            server: One of :data:`SERVERS`.
            served: Its run.
            stock: SGLang's own run with the same draft model.
            aborted: Of this request only the first tokens are looked at.
            counted: Whether steps must stay within their budget.
        """
        if served.error:
            return [served.error]
        found = []
        for number, answer in enumerate(self.answers):
            if number == aborted:
                tokens = served.outputs[number]
                if not 0 < len(tokens) < TOKENS or tokens != answer.tokens[: len(tokens)]:
                    found.append(f"tokens of request {number}, which was aborted: {tokens}")
                continue
            if served.outputs[number] != answer.tokens:
                found.append(f"tokens of request {number}")
            kept, width = torch.tensor(served.keys[number]), answer.kept.shape[1]
            if len(answer.kept) - len(kept) > NOT_KEPT:
                found.append(f"request {number} left {len(kept)} tokens in the cache")
            if _differ(kept[:, :width], answer.kept):
                found.append(f"keys and values of the target, request {number}")
            if stock and _differ(kept[:, width:], torch.tensor(stock.keys[number])[:, width:]):
                found.append(f"keys and values of the draft model, request {number}")
        budget = RELEASE.budget.get(server, ()) if counted else ()
        for what, allowed in zip(COUNTED, budget, strict=False):
            most = max(step.get(what, 0) for step in served.steps)
            if most > allowed:
                found.append(f"{most} {what} in a step, and {allowed} are allowed: {served.sites}")
        return found


def _seeded(number: int) -> dict[str, Any]:
    return {"temperature": (1.0, 0.7)[number % 2], "sampling_seed": 1000 + number}


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two sketches do, in the tokens that both have; nan differs from all."""
    shared = min(len(one), len(other))
    return not torch.allclose(one[:shared], other[:shared], rtol=0, atol=ROUNDING)

"""One load for every combination: requests join, abort, are retracted, and some have seeds.

suite = LosslessnessSuite.of(server without speculation, greedy bodies, prompts)
suite.run(server started with FLAGS and RETRACTING)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from eval.lossless import seeded
from eval.prompts import demo_mix
from eval.server import TARGET, Server
from sglang_c2t.offline.client import LoadResult, differing, greedy, run_load
from tests.e2e.conftest import CONCURRENCY, assert_same_logprobs, run_beside_aborts, verified

#: Flags of both servers: SGLang reads seeds only with them.
FLAGS = seeded.FLAGS

#: Environment of the server that drafts. SGLang retracts every third step; its strict memory check
#: ends the server on a leak.
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}

_TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
#: Prompts in the demo models' vocabulary.
PROMPTS = [_TOKENIZER(prompt.text)["input_ids"] for prompt in demo_mix(8, seed=11)]

#: One cut per load: a request with another cut in the batch changes what SGLang draws.
CUTS = "whole", "top_p"


@dataclass(frozen=True)
class LosslessnessSuite:
    """Requests, and their answers without speculation."""

    greedy: list[dict[str, Any]]
    """Requests of many lengths, so that some end while others join."""
    drawn: list[list[dict[str, Any]]]
    """Requests with seeds, a list per cut."""
    wanted: list[LoadResult]
    """Answers to ``greedy``, and to each list of ``drawn``."""

    @classmethod
    def of(
        cls, alone: Server, greedy: list[dict[str, Any]], prompts: Sequence[Sequence[int]],
        answers: LoadResult | None = None,
    ) -> LosslessnessSuite:  # fmt: skip
        """Ask ``alone``, which does not speculate, for what it has not answered yet.

        ``prompts``, in tokens, are continued with seeds. ``answers``: those to ``greedy``.
        """
        drawn = [seeded.bodies(prompts, cut) for cut in CUTS]
        asked = drawn if answers else [greedy, *drawn]
        wanted = [run_load(alone.url, bodies, concurrency=4) for bodies in asked]
        return cls(greedy, drawn, [answers, *wanted] if answers else wanted)

    def run(self, server: Server, concurrency: int = CONCURRENCY, victims: int = 400) -> None:
        """Assert equal tokens, accepted drafts, some retractions, and no lost slot.

        ``victims``: tokens that each aborted request asks for.
        """
        results = [run_beside_aborts(server, self.greedy, concurrency, victims)]
        assert_drafted_well(results[0])
        for bodies in self.drawn:
            server.flush_cache()  # once all are gone, as greedy ones are cut
            results.append(run_load(server.url, bodies, concurrency=concurrency))
        for result, wanted in zip(results, self.wanted, strict=True):
            assert differing(result.outputs, wanted.outputs) == []
        answers = [answer for result in results for answer in result.answers]
        assert sum(answer.meta_info["num_retractions"] for answer in answers) > 0
        server.flush_cache()  # an idle server checks its memory
        assert server.process.poll() is None


def assert_drafted_well(result: LoadResult) -> None:
    """Enough was accepted to show something."""
    drafted = [answer for answer in result.answers if verified(answer)]
    assert sum(a.meta_info["spec_num_correct_drafts"] for a in drafted) > len(drafted)


def assert_keys_of_a_prompt(server: Server, plain: Server, model: Path) -> None:
    """Assert that answers of ``server`` continue as they do after a prefill of all tokens.

    ``server`` has their keys from verification, and ``plain`` computes them again.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    server.flush_cache()
    asked = [greedy(prompt.text, 24) for prompt in demo_mix(8, seed=12)]
    said = run_load(server.url, asked, concurrency=8).answers
    again: list[dict[str, Any]] = [
        {
            "input_ids": [*tokenizer(body["text"])["input_ids"], *answer.output_ids],
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            "return_logprob": True, "top_logprobs_num": 5,
        }
        for body, answer in zip(asked, said, strict=True)
    ]  # fmt: skip
    kept = run_load(server.url, again, concurrency=1)
    for body, answer in zip(again, kept.answers, strict=True):
        assert answer.meta_info["cached_tokens"] > len(body["input_ids"]) - 8
    plain.flush_cache()
    assert_same_logprobs(kept, run_load(plain.url, again, concurrency=1))

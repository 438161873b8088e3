"""SGLang's own test kits, from its wheel, against a ``--c2t`` server.

Kits not run, with their reasons: SpecAccuracyKit and SpecPerfKit download GSM8K and ask a
score of a trained 8B model; their question, "are outputs right", is asked token by token
in test_chain_serving.py. SpecSamplingMaskKit asks for ``return_sampling_mask``, which SGLang
0.5.23 answers with "not supported with speculative decoding" here, with and without C2T.
"""

from __future__ import annotations

import functools
import json
import random
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import requests
from sglang.test.kits import radix_cache_server_kit as radix_kit
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecHiddenStatesKit,
    SpecLogprobKit,
    SpecParityKit,
    SpecPenaltyKit,
    _greedy,
)
from transformers import AutoTokenizer

from eval.prompts import demo_mix
from eval.server import TARGET, Launch, Server, running, speculative_flags
from sglang_c2t.client import greedy


class KitServer(unittest.TestCase):
    """What SGLang's fixture gives its kits, on the demo models and the CPU."""

    base_url: ClassVar[str]
    process: ClassVar[Any]
    drafts: ClassVar[dict[str, int]] = {}
    model = str(TARGET)

    @pytest.fixture(autouse=True, scope="class")
    def _serve(self, request: pytest.FixtureRequest, logs: Path, plain: Server) -> Any:
        prompts = SpecParityKit.parity_prompts
        request.cls.parity_ref_outputs = {p: _greedy(plain.url, p) for p in prompts}
        drafts = speculative_flags("EAGLE3", **request.cls.drafts)
        flags = (*drafts, "--c2t", "--enable-return-hidden-states")
        with running(Launch(f"kits-{request.cls.__name__}", flags), logs) as server:
            request.cls.base_url = server.url
            request.cls.process = server.process
            request.cls.tokenizer = AutoTokenizer.from_pretrained(TARGET)
            yield

    def run_decode(self, sampling_params: dict[str, Any]) -> None:
        """Used by the penalty kit."""
        params = {"temperature": 0, "max_new_tokens": 64, **sampling_params}
        body = {"text": demo_mix(1)[0].text, "sampling_params": params}
        self._ok(requests.post(f"{self.base_url}/generate", json=body, timeout=120))

    def send_request(self) -> None:
        """Used by the abort test: requests that must finish."""
        for prompt in demo_mix(4):
            body = greedy(prompt.text, 64)
            self._ok(requests.post(f"{self.base_url}/generate", json=body, timeout=120))

    def send_requests_abort(self) -> None:
        """Used by the abort test: requests whose client hangs up."""
        for prompt in demo_mix(4, seed=1):
            body = greedy(prompt.text, 512)
            body["sampling_params"]["ignore_eos"] = True
            with pytest.raises(requests.Timeout):
                requests.post(f"{self.base_url}/generate", json=body, timeout=0.05)

    def _ok(self, response: SimpleNamespace | requests.Response) -> None:
        assert response.status_code == 200, response.text


class TestSglangKits(
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecHiddenStatesKit,
    SpecLogprobKit,
    SpecParityKit,
    SpecPenaltyKit,
    KitServer,
):
    """One server of chains, every kit that the CPU engine can run, at the demo models' scale."""

    # float32 throughout: decode and prefill differ by rounding only (upstream: 0.5 for bf16).
    logprob_match_delta = 1e-3
    # The kits' prompts are foreign to the demo models, so hardly a draft is accepted; how much
    # is accepted on their own prompts is asked in test_unusual_servers.py.
    acc_length_thres = 1.0
    batch_accept_len_thres = 1.0
    # Same keys as upstream's schema, but no value can outgrow the kit's 256 tokens: a tiny
    # model need not know how to close a string.
    grammar_json_schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                "population": {"type": "integer", "minimum": 0, "maximum": 9999},
                "country": {"type": "string", "pattern": "^[a-z ]{1,8}$"},
                "capital": {"type": "string", "pattern": "^[a-z ]{1,8}$"},
            },
            "required": ["name", "population", "country", "capital"],
        }
    )

    @classmethod
    def setUpClass(cls) -> None:
        """The parity kit would launch its reference for a GPU; the fixture above has one."""

    @pytest.fixture(autouse=True)
    def _radix_trees_within_the_vocabulary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kit draws token ids up to 32,000 and contexts of thousands of tokens."""
        monkeypatch.setattr(radix_kit, "random", _DemoVocabulary(0))
        tree = functools.partial(radix_kit.gen_radix_tree, num_nodes=100, chunk_len=48)
        monkeypatch.setattr(radix_kit, "gen_radix_tree", tree)


class TestSglangKitsOnTrees(TestSglangKits):
    """The same, every draft a tree."""

    drafts: ClassVar[dict[str, int]] = {"topk": 4, "num_draft_tokens": 16}


class _DemoVocabulary(random.Random):
    """Draws no number that is not a token of the demo models."""

    def randint(self, a: int, b: int) -> int:
        return super().randint(a, min(b, 2047))

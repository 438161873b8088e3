"""SGLang's own test kits, from its wheel, against ``--c2t`` servers.

Kits are patched in scale only: token ids within the demo models' vocabulary, lengths within their
2,048 positions. Left out are those that score a trained model, ask other APIs or need a GPU, those
whose prompts would have to be replaced (JSON mode, matched stops, multi-turn caches: other tests
compare these with a server without speculation), and SpecSamplingMaskKit and SpecHiddenStatesKit,
whose fields SGLang and C2T refuse.
"""

from __future__ import annotations

import json
import random
import unittest
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import requests
from sglang.test.kits import (
    abort_timeout_kit,
    basic_api_contract_kit,
    ebnf_constrained_kit,
    json_constrained_kit,
    pause_generation_kit,
    radix_cache_server_kit,
    regex_constrained_kit,
    spec_server_kits,
    streaming_session_kit,
)
from sglang.test.server_fixtures import streaming_session_fixture
from transformers import AutoTokenizer

from eval.demo_models.modeling import VOCAB
from eval.prompts import demo_mix
from eval.server import TARGET, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import greedy

pytestmark = pytest.mark.extended

MOST_NEW_TOKENS = 1200  # within the demo models' positions
TREES = {"topk": 4, "num_draft_tokens": 16}


class DemoVocabulary(random.Random):
    """Draws no number that is not a token of the demo models."""

    def randint(self, a: int, b: int) -> int:
        """As ``random.Random``, the upper end cut."""
        return super().randint(a, min(b, VOCAB - 1))


def post(url: str, json: Any = None, **kwargs: Any) -> requests.Response:
    """As ``requests.post``; the session kit aborts answers of 100,000 tokens in the middle."""
    params = (json or {}).get("sampling_params", {})
    if params.get("max_new_tokens", 0) > MOST_NEW_TOKENS:
        params = {**params, "max_new_tokens": MOST_NEW_TOKENS, "ignore_eos": True}
        json = {**json, "sampling_params": params}
    return requests.post(url, json=json, **kwargs)


def short_schema(*phrases: str, **more: Any) -> str:
    """Same keys as upstream's schemas, but no value can outgrow the kits' 128 or 256 tokens.

    A tiny model need not know how to close a string.
    """
    properties: dict[str, Any] = {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "population": {"type": "integer", "minimum": 0, "maximum": 9999},
        **{phrase: {"type": "string", "pattern": "^[a-z ]{1,8}$"} for phrase in phrases},
    }
    required = list(properties)
    return json.dumps({"type": "object", "properties": properties, "required": required, **more})


@pytest.fixture(scope="module")
def references(plain: Server) -> Iterator[Mapping[str, str]]:
    """Texts without speculation of the parity kit's prompts; kits are scaled until the end."""
    tree = partial(radix_cache_server_kit.gen_radix_tree, num_nodes=100, chunk_len=48)
    client = SimpleNamespace(get=requests.get, post=post)
    with pytest.MonkeyPatch.context() as scale:
        scale.setattr(radix_cache_server_kit, "random", DemoVocabulary(0))
        scale.setattr(radix_cache_server_kit, "gen_radix_tree", tree)
        scale.setattr(streaming_session_kit, "requests", client)
        scale.setattr(streaming_session_fixture, "CONCURRENT_LOGPROB_ROUNDS", 1)
        scale.setattr(streaming_session_fixture, "STRESS_NUM_TURNS", 2)
        prompts = spec_server_kits.SpecParityKit.parity_prompts
        yield {prompt: spec_server_kits._greedy(plain.url, prompt) for prompt in prompts}


class OnAServer(unittest.TestCase):
    """A server for each class of kits, and the attributes that SGLang's fixtures give them."""

    flags: ClassVar[tuple[str, ...]] = ()
    env: ClassVar[dict[str, str]] = {}
    drafts: ClassVar[dict[str, int]] = {}
    base_url: ClassVar[str]
    process: ClassVar[Any]
    tokenizer: ClassVar[Any]
    parity_ref_outputs: ClassVar[Mapping[str, str]]
    model = str(TARGET)

    @pytest.fixture(autouse=True, scope="class")
    def _serve(
        self, request: pytest.FixtureRequest, logs: Path, references: Mapping[str, str]
    ) -> Any:
        cls = request.cls
        flags = (*speculative_flags("EAGLE3", **cls.drafts), "--c2t", *cls.flags)
        with running(Launch(f"kits-{cls.__name__}", flags, env=cls.env), logs) as server:
            cls.base_url, cls.process = server.url, server.process
            cls.tokenizer = AutoTokenizer.from_pretrained(TARGET)
            cls.parity_ref_outputs = references
            yield


class TestSglangKits(
    spec_server_kits.SpecCorrectnessKit,
    spec_server_kits.SpecFeatureKit,
    spec_server_kits.SpecGrammarKit,
    spec_server_kits.SpecLogprobKit,
    spec_server_kits.SpecParityKit,
    spec_server_kits.SpecPenaltyKit,
    basic_api_contract_kit.BasicAPIContractMixin,
    abort_timeout_kit.AbortAllMixin,
    pause_generation_kit.PauseResumeInPlaceMixin,
    regex_constrained_kit.RegexConstrainedMixin,
    ebnf_constrained_kit.EBNFConstrainedMixin,
    json_constrained_kit.JSONConstrainedMixin,
    streaming_session_kit.StreamingSessionKitMixin,
    OnAServer,
):
    """One server of chains, every kit that it can host."""

    flags = ("--enable-streaming-session",)

    # float32 throughout: decode and prefill differ by rounding only (upstream: 0.5 for bf16).
    logprob_match_delta = 1e-3
    # The kits' prompts are foreign to the demo models, so hardly a draft is accepted.
    acc_length_thres = 1.0
    batch_accept_len_thres = 1.0
    grammar_json_schema = short_schema("country", "capital")
    json_schema = short_schema(additionalProperties=False)
    abort_all_max_new_tokens = 1600
    pause_max_new_tokens = 128
    pause_duration = 2
    pause_ignore_eos = True
    # The demo target closes no string within 128 tokens, with or without speculation.
    test_regex_generate_complex_json = None
    test_ebnf_generate_complex_json = None

    @classmethod
    def setUpClass(cls) -> None:
        """The parity kit would launch its reference for a GPU."""

    def run_decode(self, sampling_params: dict[str, Any]) -> None:
        """Used by the penalty kit."""
        params = {"temperature": 0, "max_new_tokens": 64, **sampling_params}
        body: dict[str, Any] = {"text": demo_mix(1)[0].text, "sampling_params": params}
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

    def _ok(self, response: requests.Response) -> None:
        assert response.status_code == 200, response.text


class TestSglangKitsOnTrees(TestSglangKits):
    """The same, every draft a tree."""

    drafts = TREES


class TestWaitingTimeout(abort_timeout_kit.WaitingTimeoutMixin, OnAServer):
    """On a server of trees, a request waits too long behind another."""

    flags = ("--skip-server-warmup", "--max-running-requests", "1")
    env: ClassVar[dict[str, str]] = {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}
    drafts = TREES

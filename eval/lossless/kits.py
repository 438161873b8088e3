# mypy: allow-subclassing-any
"""SGLang's own test kits, from its wheel, for servers of the demo models.

Kits are patched in scale only: prompts that the demo models know, token ids within their
vocabulary, lengths within their 2,048 positions. ``tests/e2e/test_sglang_kits.py`` calls
:func:`attach` on each class and runs it. ``NOT_RUN`` lists the kits that are left out.
"""

from __future__ import annotations

import contextlib
import json
import random
import unittest
from collections.abc import Iterator, Mapping
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import openai
import requests
from sglang.test import kl_test_utils
from sglang.test.kits import (
    abort_timeout_kit,
    basic_api_contract_kit,
    cache_hit_kit,
    ebnf_constrained_kit,
    json_constrained_kit,
    json_mode_kit,
    kl_divergence_kit,
    matched_stop_kit,
    pause_generation_kit,
    radix_cache_server_kit,
    regex_constrained_kit,
    spec_server_kits,
    streaming_session_kit,
    unified_radix_cache_kit,
)
from sglang.test.server_fixtures import streaming_session_fixture
from transformers import AutoTokenizer

from eval.demo_models.modeling import VOCAB
from eval.prompts import demo_mix
from eval.server import TARGET, Server
from sglang_c2t.offline.client import greedy

#: Kits of the wheel that are left out, and why.
NOT_RUN = {
    "SpecAccuracyKit, SpecPerfKit, eval_accuracy_kit, lm_eval_kit, basic_decode_correctness_kit, "
    "spec_decoding_kit, perf_bench_kit, fwd_occupancy_kit": "scores or speed of a trained 8B model",
    "basic_scheduler_stress_kit": "facts that a trained model knows; eval.soak loads a server more",
    "SpecSamplingMaskKit": "SGLang refuses return_sampling_mask with speculation",
    "SpecHiddenStatesKit": "C2T refuses return_hidden_states, as plain decoding returns others",
    "prefix_cache_branching_kit": "holds for hybrid (Mamba) models only",
    "streaming_session_kit, AbortLeakReproKitMixin": "pages of 256 tokens; trees need pages of 1",
    "matched_stop_kit, test_finish_stop_eos": "end tokens of Llama 3 and 2",
    "unified_radix_cache_kit, test_gsm8k": "a trained model's score",
    "regex_constrained_kit and ebnf_constrained_kit, test_*_complex_json": "the demo target closes "
    "no string within 128 tokens, with or without speculation",
    "reasoning_kit, anthropic_messages_kit, mmmu_vlm_kit, vlm_perf_kit": "other APIs and images",
    "pd_parity_kit, dsa_metadata_kit, attention_unittest, unified_radix_cache": "disaggregation, "
    "GPU kernels, cache internals",
}

STOPS_PROMPT = demo_mix(11)[10].text
"""Answered with line ends, "or" and a full stop, as text and as a chat."""

MAX_NEW_TOKENS = 64
MOST_NEW_TOKENS = 1200  # within the demo models' positions


class DemoKit(unittest.TestCase):
    """Attributes that SGLang's fixtures give its kits, for the demo models and the CPU.

    To be run within :func:`demo_scale`.
    """

    flags: ClassVar[tuple[str, ...]] = ()  # of the server
    env: ClassVar[dict[str, str]] = {}
    base_url: ClassVar[str]
    process: ClassVar[Any]
    tokenizer: ClassVar[Any]
    client: ClassVar[Any]
    parity_ref_outputs: ClassVar[Mapping[str, str]]
    model = str(TARGET)


References = Mapping[str, str]
"""Greedy texts of a server without speculation, by the prompts of the parity kit."""


def references(url: str) -> References:
    """Ask the server without speculation at ``url``."""
    prompts = spec_server_kits.SpecParityKit.parity_prompts
    return {prompt: spec_server_kits._greedy(url, prompt) for prompt in prompts}


def attach(kit: type[DemoKit], server: Server, known: References) -> None:
    """Point a class of kits to a running server."""
    kit.base_url = server.url
    kit.process = server.process
    kit.tokenizer = AutoTokenizer.from_pretrained(TARGET)
    kit.client = _client(openai.Client(api_key="none", base_url=f"{server.url}/v1"))
    kit.parity_ref_outputs = known


def assert_cached(result: dict[str, Any], prefix: int, *more: Any) -> None:
    """Stands for the cache kit's defaults, which are for servers without speculation.

    With EAGLE drafts SGLang's cache is keyed by pairs of tokens, and the last one has no pair. The
    last token of an answer, ``more`` than a label, may have no KV: it ended by its length.
    """
    *output, label = more
    actual, total = result["meta_info"]["cached_tokens"], prefix + sum(output)
    assert total - 1 - len(output) <= actual <= total - 1, f"{label}: {actual} cached of {total}"


def _json_schema(*phrases: str, **more: Any) -> str:
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


class ServingKits(
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
    json_mode_kit.JSONModeMixin,
    matched_stop_kit.MatchedStopMixin,
    kl_divergence_kit.KLDivergenceMixin,
    unified_radix_cache_kit.UnifiedRadixTreeTestMixin,
    streaming_session_kit.StreamingSessionKitMixin,
    DemoKit,
):
    """Every kit that one server can host."""

    flags = ("--enable-streaming-session",)

    # float32 throughout: decode and prefill differ by rounding only (upstream: 0.5 for bf16,
    # and KL divergences around 1e-3).
    logprob_match_delta = 1e-3
    kl_div_thres = 1e-9
    kl_threshold = 1e-9
    # The kits' prompts are foreign to the demo models, so hardly a draft is accepted.
    acc_length_thres = 1.0
    batch_accept_len_thres = 1.0
    grammar_json_schema = _json_schema("country", "capital")
    json_schema = _json_schema(additionalProperties=False)
    abort_all_max_new_tokens = 1600
    pause_max_new_tokens = 128
    pause_duration = 2
    pause_ignore_eos = True
    kl_div_max_samples = 8
    kl_div_prefill_max_new_tokens = MAX_NEW_TOKENS
    kl_div_decode_max_new_tokens = MAX_NEW_TOKENS
    max_new_tokens = 24
    prefix_len = 100
    prefill_cache_assert = decode_cache_assert = staticmethod(assert_cached)
    test_gsm8k = None
    test_finish_stop_eos = None
    test_regex_generate_complex_json = None
    test_ebnf_generate_complex_json = None

    @classmethod
    def setUpClass(cls) -> None:
        """The parity kit would launch its reference for a GPU; :func:`attach` brought one."""

    @property
    def input_ids(self) -> list[list[int]]:
        """Prompts of the cache kit."""
        return demo_token_ids(4, 2 * self.prefix_len)

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
            try:
                requests.post(f"{self.base_url}/generate", json=body, timeout=0.05)
            except requests.Timeout:
                continue
            raise AssertionError("the request ended before its client hung up")

    def _ok(self, response: requests.Response) -> None:
        assert response.status_code == 200, response.text

    # The stop kit's, with a prompt whose answer holds the stops.
    _run_completions_generation = partialmethod(
        matched_stop_kit.MatchedStopMixin._run_completions_generation, prompt=STOPS_PROMPT
    )
    _run_chat_completions_generation = partialmethod(
        matched_stop_kit.MatchedStopMixin._run_chat_completions_generation, prompt=STOPS_PROMPT
    )

    def test_multiturn_cache_hits(self) -> None:
        """cache_hit_kit is a function; it asserts what each turn finds in the cache."""
        cache_hit_kit.run_multiturn_cache_hit_test(
            self.base_url, self.model, request_length=96, output_length=24,
            miss_tolerance=2,  # see assert_cached
        )  # fmt: skip


class RunningTimeoutKits(abort_timeout_kit.RunningTimeoutTwoWaveMixin, DemoKit):
    """Requests that exceed their time while others run."""

    flags = ("--skip-server-warmup",)  # which is a request, and may take too long itself
    env: ClassVar[dict[str, str]] = {"SGLANG_REQ_RUNNING_TIMEOUT": "3"}
    running_timeout_sleep = 1
    running_timeout_max_new_tokens = 1600


class WaitingTimeoutKits(abort_timeout_kit.WaitingTimeoutMixin, DemoKit):
    """A request that waits too long behind another."""

    flags = ("--skip-server-warmup", "--max-running-requests", "1")
    env: ClassVar[dict[str, str]] = {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}


# -- scale ----------------------------------------------------------------------------------


@contextlib.contextmanager
def demo_scale() -> Iterator[None]:
    """Kits of prompts and lengths that the demo models can take, for the time of the block."""
    tree = partial(radix_cache_server_kit.gen_radix_tree, num_nodes=100, chunk_len=48)
    with contextlib.ExitStack() as patches:
        for module, name, fit in (
            (radix_cache_server_kit, "random", DemoVocabulary(0)),
            (radix_cache_server_kit, "gen_radix_tree", tree),
            (unified_radix_cache_kit, "_random_suffixes", _suffixes),
            (unified_radix_cache_kit, "random", SimpleNamespace(Random=DemoVocabulary)),
            (kl_test_utils, "get_input_ids", _kl_prompts),
            (cache_hit_kit, "sample_random_requests", _cache_prompts),
            (streaming_session_kit, "requests", SimpleNamespace(get=requests.get, post=_post)),
            (streaming_session_fixture, "CONCURRENT_LOGPROB_ROUNDS", 1),
            (streaming_session_fixture, "STRESS_NUM_TURNS", 2),
        ):
            patches.enter_context(mock.patch.object(module, name, fit))
        yield


class DemoVocabulary(random.Random):
    """Draws no number that is not a token of the demo models."""

    def randint(self, a: int, b: int) -> int:
        """As ``random.Random``, the upper end cut."""
        return super().randint(a, min(b, VOCAB - 1))


def demo_token_ids(num: int, length: int, seed: int = 4) -> list[list[int]]:
    """``num`` different prompts of ``length`` tokens, no two with a common prefix."""
    rng = DemoVocabulary(seed)
    return [[rng.randint(2, VOCAB) for _ in range(length)] for _ in range(num)]


def _suffixes(num: int, length: int, seed: int) -> list[list[int]]:
    """The turns of the cache kit, a fourth as long: three of them and their answers must fit."""
    return demo_token_ids(num, length // 4, seed)


def _kl_prompts(num_samples: int, **_: Any) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer(prompt.text)["input_ids"] for prompt in demo_mix(num_samples, seed=4)]


def _cache_prompts(input_len: int, num_prompts: int, **_: Any) -> list[SimpleNamespace]:
    ids = demo_token_ids(num_prompts, input_len, seed=input_len + num_prompts)
    return [SimpleNamespace(prompt=prompt) for prompt in ids]


def _client(client: openai.Client) -> SimpleNamespace:
    """The client of the JSON kit, whose prompt stands in its code: here one of JSON objects."""

    def create(messages: list[dict[str, str]], **kwargs: Any) -> Any:
        example = '{"name": "Vera", "age": 31, "city": "Lyon"}\n'
        question: Any = {"role": "user", "content": 6 * example}
        return client.chat.completions.create(messages=[question], **kwargs)

    completions = SimpleNamespace(create=create)
    return SimpleNamespace(chat=SimpleNamespace(completions=completions))


def _post(url: str, json: Any = None, **kwargs: Any) -> requests.Response:
    """As ``requests.post``; the session kit aborts answers of 100,000 tokens in the middle."""
    params = (json or {}).get("sampling_params", {})
    if params.get("max_new_tokens", 0) > MOST_NEW_TOKENS:
        params = {**params, "max_new_tokens": MOST_NEW_TOKENS, "ignore_eos": True}
        json = {**json, "sampling_params": params}
    return requests.post(url, json=json, **kwargs)

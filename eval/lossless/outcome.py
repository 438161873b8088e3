"""What came of SGLang's kits: tests run, kits left out. A leaf, so that reading it imports none."""

from __future__ import annotations

from dataclasses import dataclass

#: Kits of the wheel that are left out, and why.
NOT_RUN = {
    "SpecAccuracyKit, SpecPerfKit, eval_accuracy_kit, lm_eval_kit, basic_decode_correctness_kit, "
    "spec_decoding_kit, perf_bench_kit, fwd_occupancy_kit": "ask a score, a fact or a speed of a "
    "trained 8B model on a GPU, some from downloaded sets; whether outputs are right is asked "
    "token by token in the greedy part",
    "SpecSamplingMaskKit": "SGLang answers return_sampling_mask with 'not supported with "
    "speculative decoding', with and without C2T",
    "SpecHiddenStatesKit": "asserts hidden states of the layers that a draft reads; C2T answers "
    "return_hidden_states with 400, as plain decoding returns other ones",
    "prefix_cache_branching_kit": "asserts that the second branch of a prefix misses the cache, "
    "which holds for hybrid (Mamba) models only; branching is asked by the two branching tests of "
    "unified_radix_cache_kit",
    "streaming_session_kit, AbortLeakReproKitMixin": "pages of 256 tokens; trees need pages of 1",
    "matched_stop_kit, test_finish_stop_eos": "asserts the end tokens of Llama 3 and 2",
    "unified_radix_cache_kit, test_gsm8k": "downloads GSM8K and asks a trained model's score",
    "regex_constrained_kit and ebnf_constrained_kit, test_*_complex_json": "the demo target does "
    "not close a string within the kits' 128 tokens; without speculation they fail likewise",
    "reasoning_kit, anthropic_messages_kit, mmmu_vlm_kit, vlm_perf_kit": "reasoning parsers, "
    "another vendor's API, images: nothing that speculation touches, and no demo model for them",
    "pd_parity_kit, dsa_metadata_kit, attention_unittest, unified_radix_cache": "prefill-decode "
    "disaggregation, GPU kernels and the insides of a cache; no questions to a CPU server",
}


@dataclass(frozen=True)
class Outcome:
    """One test of a kit on one server."""

    server: str
    kit: str
    test: str
    passed: bool
    seconds: float
    message: str = ""  # of a failure

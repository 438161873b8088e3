"""Combinations that ``--c2t`` does not support, each refused by name before a model loads. Each row
holds the condition, the name, the reason and the remedy. The checks read SGLang's *resolved*
arguments, so they cover values that SGLang chose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_c2t.config import active
from sglang_c2t.policies import (
    ChainPolicy,
    TreePolicy,
    build_policy,
    build_tree_policy,
    plans,
)
from sglang_c2t.srt import compat, environment, seams

# NEXTN is an alias that SGLang resolves to EAGLE.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


class Refusal(NamedTuple):
    """A combination, and the sentence for the user."""

    applies: Callable[[Any], bool]
    """Whether it applies to resolved arguments."""

    what: str
    """The flags or variables that ask for it."""

    why: str
    instead: str
    """The remedy, in the imperative."""

    @property
    def sentence(self) -> str:
        """The full sentence."""
        return f"--c2t does not serve {self.what}: {self.why}; {self.instead}"


def _set(name: str) -> Callable[[Any], bool]:
    """Return a test whether the argument is on; one that SGLang no longer has is an error."""
    return lambda cfg: bool(compat.argument(cfg, name))


def _adapts(cfg: Any) -> bool:
    """Whether LoRA is on; SGLang switches it on for --lora-paths only after this step."""
    return _set("enable_lora")(cfg) or _set("lora_paths")(cfg)


def _wants_ragged() -> bool:
    config = active()
    return config is not None and config.verify == "ragged"


def trees(cfg: Any) -> bool:
    return cfg.speculative_algorithm in ALGORITHMS and cfg.speculative_eagle_topk > 1


def _drafts_nothing(cfg: Any) -> bool:
    if cfg.speculative_algorithm not in ALGORITHMS:
        return False
    return (
        min(cfg.speculative_num_steps, cfg.speculative_eagle_topk) < 1
        or cfg.speculative_num_draft_tokens < 2
    )


def _policy(cfg: Any) -> ChainPolicy | TreePolicy | None:
    """Return the configured policy for the mode of these arguments; ``None`` without C2T."""
    config = active()
    if config is None:
        return None
    return build_tree_policy(config) if trees(cfg) else build_policy(config)


def _lacks_draft(cfg: Any) -> bool:
    """Whether no draft model is named and the target's checkpoint holds none. SGLang would then
    draft with the full target.
    """
    if cfg.speculative_algorithm not in ALGORITHMS or cfg.speculative_draft_model_path is not None:
        return False
    return cfg.speculative_algorithm not in ("EAGLE", "NEXTN") or not compat.bundles_draft(cfg)


def _plans(cfg: Any) -> bool:
    policy = _policy(cfg)
    return policy is not None and plans(policy)


def _plans_static(cfg: Any) -> bool:
    config = active()
    return config is not None and config.verify == "static" and _plans(cfg)


def _keeps_nothing(cfg: Any) -> bool:
    config = active()
    return config is not None and config.state is not None and not _plans(cfg)


def _records() -> bool:
    config = active()
    return config is not None and config.record is not None


def _visits_every_root() -> bool:
    config = active()
    return config is not None and config.visits_every_root


def _bounds_rows() -> bool:
    config = active()
    return config is not None and config.max_verify_rows is not None


def has_http_workers(cfg: Any) -> bool:
    return int(compat.argument(cfg, "tokenizer_worker_num")) > 1


def _graphs(cfg: Any) -> bool:
    return cfg.device == "cuda" and compat.decode_graphs_enabled(cfg)


def _ignores_accept_thresholds(cfg: Any) -> bool:
    return trees(cfg) and not compat.accepts_exactly(cfg)


def _pages_of_trees(cfg: Any) -> bool:
    """Whether trees would need pages, from arguments that may not be resolved."""
    algorithm = (cfg.speculative_algorithm or "").upper()
    return (
        algorithm in ALGORITHMS
        and (cfg.speculative_eagle_topk or 1) > 1
        and (cfg.page_size or 1) > 1
        and cfg.attention_backend != "flashinfer"
    )


#: Also checked before SGLang's own checks, which refuse this on some backends only, with a
#: traceback.
PAGES_OF_TREES = Refusal(
    _pages_of_trees,
    "--page-size above 1 with --speculative-eagle-topk above 1 and an --attention-backend other "
    "than flashinfer",
    "SGLang drafts trees in pages on few, and of those flashinfer alone reads our masks",
    "set --page-size 1 with --speculative-eagle-topk above 1, or --speculative-eagle-topk 1",
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda cfg: cfg.speculative_algorithm is None,
        "a server without --speculative-algorithm",
        "it needs a draft model",
        f"add --speculative-algorithm {'|'.join(ALGORITHMS)} and --speculative-draft-model-path",
    ),
    Refusal(
        lambda cfg: cfg.speculative_algorithm not in (None, *ALGORITHMS),
        f"a --speculative-algorithm other than {', '.join(ALGORITHMS)}",
        "it gates the drafts of these",
        "choose one of them",
    ),
    Refusal(
        lambda cfg: cfg.speculative_eagle_topk == 1 and _bounds_rows(),
        "--c2t-max-verify-rows with --speculative-eagle-topk 1",
        "it bounds trees",
        "set --speculative-eagle-topk above 1, or drop it",
    ),
    Refusal(
        _lacks_draft,
        "this --speculative-algorithm without --speculative-draft-model-path",
        "only EAGLE and NEXTN do without, where the target's own checkpoint holds draft layers",
        "add --speculative-draft-model-path",
    ),
    PAGES_OF_TREES,
    Refusal(
        lambda cfg: trees(cfg) and cfg.attention_backend not in seams.TREE_BACKENDS,
        "--speculative-eagle-topk above 1 with an --attention-backend other than "
        f"{', '.join(seams.TREE_BACKENDS)}",
        "others do not read the masks of its trees",
        "change it, or set --speculative-eagle-topk 1",
    ),
    Refusal(
        _ignores_accept_thresholds,
        "--speculative-accept-threshold-single and --speculative-accept-threshold-acc with "
        "--speculative-eagle-topk above 1",
        "a tree's nodes are accepted exactly",
        "drop --speculative-accept-threshold-single and --speculative-accept-threshold-acc",
    ),
    Refusal(
        compat.watermarks,
        "--watermark-config",
        "packed rows are sampled without it",
        "drop it",
    ),
    Refusal(
        _drafts_nothing,
        "--speculative-num-steps or --speculative-eagle-topk below 1, or "
        "--speculative-num-draft-tokens below 2",
        "there is no draft to gate",
        "set more, or drop all three: SGLang then chooses them",
    ),
    Refusal(
        _set("speculative_adaptive"),
        "--speculative-adaptive",
        "--c2t and --speculative-adaptive both set the draft length",
        "drop one of them",
    ),
    Refusal(
        _set("speculative_use_rejection_sampling"),
        "--speculative-use-rejection-sampling",
        "whether a sampled draft token is verified must not depend on the token",
        "drop one of them",
    ),
    Refusal(
        _set("enable_multi_layer_eagle"),
        "--enable-multi-layer-eagle",
        "each of its draft layers is a separate model, and the gate reads one",
        "drop it",
    ),
    Refusal(
        lambda cfg: (
            compat.uses_dp_attention(cfg) and bool(seams.broken_seams(seams.DATA_PARALLEL_SEAMS))
        ),
        "DP attention, --enable-dp-attention or --attn-dp-size, with this SGLang",
        "its ranks exchange row counts in another way than those of the newest one",
        "drop it, or choose the newest SGLang that is served",
    ),
    Refusal(
        lambda cfg: compat.uses_dp_attention(cfg) and trees(cfg),
        "--enable-dp-attention with --speculative-eagle-topk above 1",
        "its ranks agree on layers and rows of chains",
        "set --speculative-eagle-topk 1",
    ),
    Refusal(
        lambda cfg: compat.uses_dp_attention(cfg) and _records(),
        "--enable-dp-attention with --c2t-record",
        "only one of its ranks would record",
        "drop --enable-dp-attention while recording",
    ),
    Refusal(
        lambda cfg: compat.uses_dp_attention(cfg) and compat.disaggregates(cfg),
        "--enable-dp-attention with --disaggregation-mode",
        "the two were not tested together",
        "drop one of them",
    ),
    Refusal(
        lambda cfg: (
            compat.uses_dp_attention(cfg) and compat.argument(cfg, "elastic_ep_backend") is not None
        ),
        "--enable-dp-attention with --elastic-ep-backend",
        "which ranks forward together may then change",
        "drop one of them",
    ),
    Refusal(
        lambda cfg: (
            compat.uses_dp_attention(cfg)
            and environment.is_on("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION")
        ),
        "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION",
        "ranks that prefill in the same step do not know the packed rows",
        "unset SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION",
    ),
    Refusal(
        _set("enable_two_batch_overlap"),
        "--enable-two-batch-overlap",
        "it halves batches by equally many rows for each request",
        "drop it",
    ),
    Refusal(
        _set("enable_pdmux"),
        "--enable-pdmux",
        "verification concurrent with a prefill on other streams was not tested",
        "drop it",
    ),
    Refusal(
        lambda cfg: _adapts(cfg) and not compat.verifies_adapters(),
        "LoRA, --enable-lora or --lora-paths, in an SGLang without LoRA for packed rows",
        "0.5.23 has it and releases before it do not",
        "drop --enable-lora and --lora-paths, and serve merged weights",
    ),
    Refusal(
        lambda cfg: _adapts(cfg) and cfg.speculative_algorithm == "STANDALONE",
        "LoRA, --enable-lora or --lora-paths, with --speculative-algorithm STANDALONE",
        "SGLang serves it with EAGLE, EAGLE3 and NEXTN",
        "choose one of them, or drop --enable-lora and --lora-paths",
    ),
    Refusal(
        _set("enable_return_routed_experts"),
        "--enable-return-routed-experts",
        "it gives experts back for equally many rows of each request",
        "drop it",
    ),
    Refusal(
        lambda cfg: cfg.pp_size > 1,
        "pipeline parallelism, --pp-size above 1",
        "later stages would not learn which rows are verified",
        "set --pp-size 1; --tp-size spreads a model as well",
    ),
    Refusal(
        lambda cfg: compat.disaggregates(cfg) and cfg.speculative_algorithm == "STANDALONE",
        "--disaggregation-mode with --speculative-algorithm STANDALONE",
        "SGLang hands the decode server a hidden state, which such a draft has none of",
        "drop --disaggregation-mode, or choose EAGLE or EAGLE3",
    ),
    Refusal(
        lambda cfg: (
            compat.disaggregates(cfg)
            and compat.argument(cfg, "disaggregation_transfer_backend") != "mooncake"
        ),
        "--disaggregation-mode with a --disaggregation-transfer-backend other than mooncake",
        "no other was tested",
        "choose mooncake",
    ),
    Refusal(
        lambda cfg: compat.disaggregates(cfg) and _records(),
        "--disaggregation-mode with --c2t-record",
        "the first draft of each request is measured on the server that prefills",
        "drop one of them",
    ),
    Refusal(
        lambda cfg: _graphs(cfg) and _set("disable_cuda_graph_padding")(cfg),
        "--disable-cuda-graph-padding",
        "rows are padded to token tiers in CUDA graphs",
        "drop --disable-cuda-graph-padding",
    ),
    Refusal(
        lambda cfg: cfg.device not in ("cpu", "cuda"),
        "a --device other than cuda and cpu",
        "none was tried",
        "change it",
    ),
    Refusal(
        lambda cfg: (
            _wants_ragged()
            and not trees(cfg)
            and cfg.attention_backend not in seams.RAGGED_BACKENDS
        ),
        "--c2t-verify ragged with an --attention-backend other than "
        f"{', '.join(seams.RAGGED_BACKENDS)}",
        "others do not read packed rows",
        "change --attention-backend, or drop --c2t-verify: all rows are then verified",
    ),
    Refusal(
        _plans_static,
        "--c2t-verify static with a --c2t-policy that plans",
        "it decides how many rows are verified",
        "drop --c2t-verify static, or choose another policy",
    ),
    Refusal(
        lambda cfg: _bounds_rows() and trees(cfg) and _plans(cfg),
        "--c2t-max-verify-rows with a --c2t-policy that plans",
        "it decides how many rows are verified",
        "drop --c2t-max-verify-rows, or choose another policy",
    ),
    Refusal(
        _keeps_nothing,
        "--c2t-state with a --c2t-policy that does not plan",
        "it keeps what a planner has learnt",
        "choose --c2t-policy auto or rows-only, or drop it",
    ),
    Refusal(
        lambda cfg: _visits_every_root() and _set("enable_mixed_chunk")(cfg),
        "--c2t-record-roots every with --enable-mixed-chunk",
        "a step with another request's prompt takes a token without a draft after it",
        "drop --enable-mixed-chunk while recording",
    ),
    Refusal(
        lambda cfg: has_http_workers(cfg) and not environment.names_http_app(),
        "--tokenizer-worker-num above 1 in an SGLang whose HTTP workers cannot load plugins",
        "there is no /c2t in them, and no check of requests; 0.5.23 can, 0.5.17 cannot",
        "set --tokenizer-worker-num 1",
    ),
    Refusal(
        lambda cfg: has_http_workers(cfg) and environment.own_http_app(),
        f"--tokenizer-worker-num above 1 with an app of your own in {environment.HTTP_APP}",
        "the HTTP workers import ours, which loads the plugin there",
        f"unset {environment.HTTP_APP}, or set --tokenizer-worker-num 1",
    ),
    Refusal(
        lambda cfg: _set("smg_grpc_mode")(cfg) or _set("grpc_mode")(cfg),
        "--smg-grpc-mode and --grpc-mode",
        "requests reach the scheduler past our checks of them",
        "drop --smg-grpc-mode and --grpc-mode",
    ),
    Refusal(
        lambda cfg: environment.is_on("SGLANG_RUST_SERVER"),
        "SGLANG_RUST_SERVER",
        "requests reach the scheduler past our checks of them",
        "unset SGLANG_RUST_SERVER",
    ),
    Refusal(
        _set("use_ray"),
        "--use-ray",
        "whether Ray's actors load plugins was not tested",
        "drop --use-ray",
    ),
    Refusal(
        lambda cfg: environment.envs().SGLANG_SIMULATE_ACC_LEN.get() > 0,
        "SGLANG_SIMULATE_ACC_LEN",
        "drafts that are accepted by chance cannot be gated",
        "unset SGLANG_SIMULATE_ACC_LEN",
    ),
    Refusal(
        lambda cfg: environment.envs().SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get(),
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        "the verify batch is built from the draft's output",
        "unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
    ),
)

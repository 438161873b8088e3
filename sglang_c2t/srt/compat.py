"""The seams: every place in SGLang we hold on to, probed by feature, never by version.

SGLang's plugin loader logs and swallows exceptions, so a seam that moved would leave a
server that looks right and runs without C2T. Therefore each seam is listed here with
what it is for, and ``--c2t`` refuses to start when one is missing. Where a seam moved
between the releases we serve, both places are listed, and the functions at the end of
the file take the one that is there. What is written to SGLang's or FlashInfer's objects goes
through :func:`write` or :func:`swapped`, which want it to be there.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.policies.base import TreeShape

EAGLE_WORKER = "sglang.srt.speculative.eagle_worker_v2"
DRAFT_EXTEND_GRAPHS = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"
DECODE_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
KV_CACHE = "sglang.srt.mem_cache.kv_cache_configurator"
ALLOCATION = "sglang.srt.mem_cache.allocation_sizing"
GRAPH_BACKEND = (
    "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend.BaseCudaGraphBackend"
)
FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
STANDALONE_WORKER = "sglang.srt.speculative.standalone_worker_v2"
EAGLE_COMMON = "sglang.srt.speculative.eagle_worker_common"
EAGLE_INFO = "sglang.srt.speculative.eagle_info"
FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
CACHE_LOCS = "sglang.kernels.ops.speculative.cache_locs"
OVERRIDES = "sglang.srt.arg_groups.overrides"
RESOLUTION_HOOKS = "sglang.srt.arg_groups.resolution_hooks"
SERVER_ARGS = "sglang.srt.server_args"
AUTH = "sglang.srt.utils.auth"
IO_STRUCT = "sglang.srt.managers.io_struct"
WATERMARKING = "sglang.srt.sampling.watermarking"
METADATA_GLUE = "sglang.srt.model_executor.runner.metadata_glue_graph"
KV_INDEX_TRANSLATOR = "sglang.srt.mem_cache.kv_index_translator"
RAGGED_VERIFY = "sglang.srt.speculative.ragged_verify"
SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"
SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
FLASHINFER_PREFILL = "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper"
FLASHINFER_DECODE = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"

# Hook targets, named once: plugin.py registers on them, the probes below look them up.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
SPEC_METRICS = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"
)
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
SET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.set_internal_state"
ASK_INTERNAL_STATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.set_internal_state"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"
VALIDATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
#: FastAPI's, which calls it by its global name.
READ_BODY = "fastapi.routing", "solve_dependencies"
CREATE_MESSAGE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
NORMALIZE_REQUEST = f"{IO_STRUCT}.GenerateReqInput.normalize_batch_and_arguments"
VERIFY_SAMPLING_PARAMS = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
RESOLVE_RESULT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
)
LOG_STATS = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats"
MODEL_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
#: Attention backends that may read packed rows, by SGLang's name; verify/backends.py looks at
#: the backend itself once it exists.
RAGGED_BACKENDS = ("fa3", "flashinfer", "intel_amx")

#: Attention backends that read our tree masks, by SGLang's name; the CPU one is ours, see
#: cpu/engine.py.
TREE_BACKENDS = ("flashinfer", "intel_amx")

#: Steps of SGLang's argument resolution that we wrap, by the names of its resolution hooks,
#: and the functions that are these steps in an SGLang without resolution hooks.
SPECULATIVE_STEP = "handle_speculative_decoding"
ATTENTION_STEP = "handle_attention_backend_compatibility"
STEP_FUNCTIONS = {
    SPECULATIVE_STEP: f"sglang.srt.arg_groups.speculative_hook.{SPECULATIVE_STEP}",
    ATTENTION_STEP: f"{SERVER_ARGS}.ServerArgs._{ATTENTION_STEP}",
}


class SeamError(ConfigError):
    """The installed SGLang lacks something C2T attaches to."""


@dataclass(frozen=True)
class Seam:
    """One symbol of SGLang or FlashInfer that we call, override, wrap or write.

    ``parameters`` are names the callable must accept; ``fields`` are names that instances of
    the class must have (:func:`attribute_names`). ``hook`` marks targets of SGLang's own hook
    registry. ``otherwise`` is what we hold on to in an SGLang that does not offer this.
    ``only_with`` names a module: without it there is nothing that we would hold on to.
    """

    target: str
    purpose: str
    parameters: Sequence[str] = ()
    fields: Sequence[str] = ()
    hook: bool = False
    otherwise: Seam | None = None
    only_with: str | None = None

    def chosen(self) -> Seam:
        """The seam itself or, where it does not fit and another does, that one."""
        if self._own_defect() is None or self.otherwise is None:
            return self
        return self if self.otherwise.defect() is not None else self.otherwise.chosen()

    def defect(self) -> str | None:
        """What is wrong with the seam in this SGLang; ``None`` when it fits."""
        own = self._own_defect()
        if own is None or self.otherwise is None:
            return own
        other = self.otherwise.defect()
        return None if other is None else f"{own}; nor {self.otherwise.target}: {other}"

    def _own_defect(self) -> str | None:
        if self.only_with is not None and not _exists(self.only_with):
            return None
        try:
            found = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            return f"not found ({error})"
        missing = [p for p in self.parameters if p not in _parameters(found)]
        if missing:
            return f"lacks the parameters {missing}"
        missing = [f for f in self.fields if f not in attribute_names(found)]
        if missing:
            return f"lacks the fields {missing}"
        return None


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def _exists(module: str) -> bool:
    """Whether a module can be found; it is not imported, only the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False


@functools.cache
def attribute_names(cls: type) -> frozenset[str]:
    """What instances of ``cls`` have, without making one (that may take a GPU): fields of a
    dataclass, attributes of the class, and what its methods assign to ``self`` by their source.
    """
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return frozenset(dir(cls)).union(fields, *map(_assigned, cls.__mro__))


@functools.cache
def _assigned(cls: type) -> frozenset[str]:
    """Attributes that the methods of this very class assign to their first argument."""
    if cls.__module__.split(".")[0] not in ("sglang", "sglang_c2t", "flashinfer"):
        return frozenset()  # a base class of another package, whose attributes we leave alone
    return _assignments(cls.__module__).get(cls.__name__, frozenset())


@functools.cache
def _assignments(module: str) -> dict[str, frozenset[str]]:
    """What the methods of each class of a module assign to their first argument."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        cls.name: frozenset(
            node.attr
            for method in ast.walk(cls)
            if isinstance(method, ast.FunctionDef) and method.args.args
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == method.args.args[0].arg
        )
        for cls in classes
    }


def resolution_seam(step: str, purpose: str) -> Seam:
    """What :func:`on_resolution` holds on to for this step."""
    return Seam(
        f"{RESOLUTION_HOOKS}.register_resolution_hook",
        purpose,
        ["name"],
        otherwise=Seam(STEP_FUNCTIONS[step], purpose, hook=True),
    )


SEAMS: tuple[Seam, ...] = (
    Seam(ADD_CLI_ARGS, "adds the --c2t flags", ["parser"], hook=True),
    Seam(FROM_CLI_ARGS, "reads the --c2t flags", ["args"], hook=True),
    Seam(CREATE_WORKER, "swaps in the C2T worker", ["server_args"], hook=True),
    Seam(SPEC_METRICS, "corrects spec_accept_rate", ["meta_info", "recv_obj", "i"], hook=True),
    Seam(INTERNAL_STATE, "reports counters in /server_info", ["recv_req"], hook=True),
    Seam(SET_INTERNAL_STATE, "changes the policy of a running server", ["recv_req"], hook=True),
    Seam(TOKENIZER_MANAGER, "answers /c2t", hook=True),
    Seam(f"{TOKENIZER_MANAGER.removesuffix('.__init__')}.get_internal_state", "answers /c2t"),
    Seam(ASK_INTERNAL_STATE, "lets nobody but /c2t change the policy", ["obj"], hook=True),
    Seam(f"{AUTH}.auth_level", "protects /c2t", ["level"]),
    Seam(f"{IO_STRUCT}.SetInternalStateReq", "answers /c2t", ["server_args"]),
    Seam(f"{IO_STRUCT}.SetInternalStateReqOutput", "answers /c2t", ["updated"]),
    Seam(VERIFY_SAMPLING_PARAMS, "checks who opts out", hook=True),
    Seam(VALIDATE_REQUEST, "refuses what would end the server", ["obj", "input_ids"], hook=True),
    Seam(".".join(READ_BODY), "answers what cannot be read with 400"),
    Seam(CREATE_MESSAGE, "refuses what would end the server", ["obj", "input_ids"], hook=True),
    Seam(NORMALIZE_REQUEST, "refuses what would end the server", hook=True),
    Seam(RESOLVE_RESULT, "counts what was verified", ["batch", "result"], hook=True),
    Seam(LOG_STATS, "corrects sglang:spec_accept_rate", ["stats"], hook=True),
    resolution_seam(SPECULATIVE_STEP, "refuses unsupported combinations before a model loads"),
    Seam(
        f"{OVERRIDES}.resolving_view",
        "reads resolved server arguments",
        otherwise=Seam(f"{OVERRIDES}.resolved_view", "reads resolved server arguments"),
    ),
    Seam(
        "sglang.srt.configs.model_config.ModelConfig.from_server_args",
        "learns whether the target's checkpoint holds a draft",
        ["server_args", "is_draft_model"],
    ),
    Seam(f"{EAGLE_WORKER}.EAGLEWorkerV2", "worker of EAGLE, EAGLE3 and NEXTN"),
    Seam(f"{EAGLE_WORKER}.EAGLEWorkerV2.verify", "cuts drafts before verification", ["batch"]),
    Seam(
        f"{EAGLE_WORKER}.EAGLEWorkerV2.init_attention_backends",
        "learns which verification the attention backend supports",
    ),
    Seam(
        f"{EAGLE_WORKER}.EAGLEWorkerV2.init_cuda_graphs",
        "compiles what packing launches before a request waits for it",
    ),
    Seam(f"{EAGLE_WORKER}.EagleDraftWorker", "draft worker of EAGLE, EAGLE3 and NEXTN"),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker.draft_forward",
        "watches the drafted layers",
        ["forward_batch"],
    ),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker._draft_extend_for_prefill",
        "measures the first drafted token after a prefill",
        ["batch"],
    ),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker._draft_extend_for_decode",
        "measures the first drafted token after a verification",
        ["batch", "batch_result"],
    ),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker.alloc_memory_pool",
        "sizes the per-request table",
        ["req_to_token_pool"],
    ),
    Seam(f"{STANDALONE_WORKER}.StandaloneWorkerV2", "worker of STANDALONE"),
    Seam(f"{STANDALONE_WORKER}.StandaloneDraftWorker", "draft worker of STANDALONE"),
    Seam(
        f"{EAGLE_COMMON}.eagle_prepare_for_verify",
        "hands the target a packed batch",
        ["verify_input", "req_to_token_pool", "batch", "target_worker"],
    ),
    Seam(f"{EAGLE_COMMON}.run_eagle_verify", "calls what packs and accepts by its global name"),
    Seam(
        f"{EAGLE_INFO}.EagleVerifyInput",
        "is cut and packed",
        fields=[
            "draft_token",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "draft_token_num",
            "max_tree_depth",
            "tree_topk",
            "custom_mask",
            "ragged_verify_layout",
        ],
    ),
    Seam(
        f"{EAGLE_INFO}.EagleVerifyInput",
        "says where the packed rows are written",
        fields=["prepared_out_cache_loc", "kv_loc_plan"],
        otherwise=Seam(
            f"{CACHE_LOCS}.assign_extend_cache_locs_uniform_func",
            "says where the packed rows are written",
            ["req_pool_indices", "start_offset", "draft_token_num"],
        ),
    ),
    Seam(
        f"{FORWARD_BATCH}.compute_spec_mrope_positions",
        "packs the positions of M-RoPE targets",
        ["model_runner", "batch", "seq_positions"],
    ),
    Seam(
        # An older SGLang prepares none, and has no field that a rename could hide.
        f"{EAGLE_INFO}.EagleVerifyInput",
        "packs the positions of M-RoPE targets",
        fields=["prepared_mrope_positions"],
        otherwise=Seam(
            f"{CACHE_LOCS}.assign_extend_cache_locs_uniform_func",
            "packs the positions of M-RoPE targets",
        ),
    ),
    Seam(
        f"{EAGLE_WORKER}.select_top_k_tokens",
        "chooses which nodes of a tree are expanded",
        ["i", "topk_p", "topk_index", "hidden_states", "scores", "topk"],
    ),
    Seam(
        f"{EAGLE_WORKER}.organize_draft_results",
        "chooses which nodes of a tree are verified",
        ["score_list", "token_list", "parents_list", "num_draft_token"],
    ),
    Seam(
        f"{EAGLE_WORKER}.build_eagle_verify_input",
        "builds the verify input of differently shaped trees",
        ["batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens"],
    ),
    Seam(f"{EAGLE_WORKER}.EagleDraftWorker.draft", "calls it by its global name", ["batch"]),
    Seam(
        f"{EAGLE_COMMON}.eagle_sample",
        "samples a token per row of a tree, then matches",
        ["verify_input", "batch", "logits_output", "grammar_mask"],
    ),
    Seam(
        f"{EAGLE_COMMON}._finalize_accept_tree_path",
        "moves the accepted path of a tree to the front",
        [
            "batch",
            "accept_index",
            "accept_lens",
            "predict",
            "logits_output",
            "token_to_kv_pool_allocator",
            "num_draft_tokens",
        ],
    ),
    Seam(
        "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func",
        "walks trees",
        [
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "target_predict",
            "topk",
        ],
    ),
    Seam(
        "sglang.srt.constrained.base_grammar_backend.GrammarMask",
        "constrains the rows of a tree",
        fields=["vocab_mask"],
    ),
    Seam("sglang.srt.layers.sampler.create_sampler", "samples as plain decoding does"),
    Seam(
        "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        "penalises the rows of a tree",
    ),
    Seam("sglang.srt.utils.async_probe.sanitize_nan_logits", "guards sampling"),
    Seam(
        f"{RAGGED_VERIFY}.RaggedVerifyLayout.from_verify_lens_device",
        "tells attention the rows of each request",
        ["verify_lens", "graph_num_tokens"],
    ),
    Seam(
        f"{RAGGED_VERIFY}.RaggedVerifyLayout",
        "tells attention the rows of each request",
        fields=["verify_lens", "verify_lens_cpu", "bs", "graph_num_tokens"],
    ),
    Seam(
        f"{RAGGED_VERIFY}.RaggedVerifyLayout.from_verify_lens",
        "captures packed rows",
        ["verify_lens_cpu", "device", "grid"],
    ),
    Seam(
        f"{RAGGED_VERIFY}.RaggedVerifyLayout.padded_to_bucket",
        "compiles what packing launches before a request waits for it",
        ["padded_bs", "cap"],
    ),
    Seam(
        "sglang.srt.speculative.eagle_utils.get_draft_input_from_target_hidden_dim",
        "compiles what packing launches before a request waits for it",
        ["model_runner"],
    ),
    Seam(
        f"{RAGGED_VERIFY}.build_capture_verify_lens",
        "captures packed rows",
        ["num_tokens", "num_slots", "num_draft_tokens"],
    ),
    Seam(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "carries verify lengths to meta_info and labels to recordings",
        fields=["cap_lens", "accept_lens", "logits_output", "num_cap_tokens"],
    ),
    Seam(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "tells how many tokens a row of results holds",
        fields=["speculative_output_stride"],
        otherwise=Seam(
            "sglang.srt.managers.utils.GenerationBatchResult",
            "tells how many tokens a row of results holds",
            fields=["speculative_num_draft_tokens"],
        ),
    ),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "measures drafted tokens",
        fields=["next_token_logits", "hidden_states"],
    ),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        "knows the requests of a step",
        fields=[
            "reqs",
            "seq_lens",
            "req_pool_indices",
            "req_to_token_pool",
            "forward_mode",
            "sampling_info",
            "return_logprob",
        ],
    ),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        "hands the target a packed batch",
        fields=["spec_info", "out_cache_loc"],
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "names requests and prompts in recordings",
        ["rid", "origin_input_ids", "sampling_params"],
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "counts what was verified",
        fields=["spec_verify_ct", "spec_num_cap_tokens", "spec_num_correct_drafts"],
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "finds a request's row in the table of KV slots",
        fields=["kv"],
        otherwise=Seam(
            f"{SCHEDULE_BATCH}.Req",
            "finds a request's row in the table of KV slots",
            fields=["req_pool_idx"],
        ),
    ),
    Seam(
        SAMPLING_INFO,
        "samples a token per row",
        fields=[
            "temperatures",
            "top_ps",
            "top_ks",
            "min_ps",
            "sampling_seed",
            "grammars",
            "has_custom_logit_processor",
            "is_all_greedy",
            "acc_additive_penalties",
            "acc_scaling_penalties",
            "logit_bias",
        ],
    ),
    Seam(
        SAMPLING_INFO,
        "leaves out the support masks of packed rows",
        fields=["sampling_mask_batch_indices"],
        otherwise=Seam(
            SAMPLING_INFO,
            "leaves out the support masks of packed rows",
            fields=["return_sampling_masks"],
        ),
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "plans the attention of packed rows",
        fields=[
            "batch_size",
            "input_ids",
            "seq_lens",
            "seq_lens_cpu",
            "req_pool_indices",
            "spec_info",
            "forward_mode",
            "mrope_positions",
        ],
    ),
    Seam(
        "sglang.srt.observability.metrics_collector.SchedulerStats",
        "corrects sglang:spec_accept_rate",
        fields=["spec_accept_rate", "spec_accept_length", "spec_cap_length"],
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
        "counts what was verified",
        fields=["current_scheduler_metrics_enabled", "metrics_collector"],
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "is timed while it verifies",
        ["forward_batch"],
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker",
        "prepares the target for packed rows",
        fields=["model_runner"],
    ),
    Seam(
        f"{EAGLE_WORKER}.EAGLEWorkerV2",
        "knows the size of drafts",
        fields=[
            "server_args",
            "target_worker",
            "_draft_worker",
            "topk",
            "speculative_num_steps",
            "speculative_num_draft_tokens",
        ],
    ),
    *(
        Seam(
            worker,
            "drafts several numbers of layers, each with its CUDA graphs and attention",
            fields=[
                "draft_runner",
                "req_to_token_pool",
                "device",
                "topk",
                "hot_token_id",
                "speculative_num_steps",
                "speculative_num_draft_tokens",
                "cuda_graph_runner",
                "cuda_graph_runner_for_draft_extend",
                "draft_attn_backend",
                "draft_extend_attn_backend",
            ],
        )
        for worker in (
            f"{EAGLE_WORKER}.EagleDraftWorker",
            f"{STANDALONE_WORKER}.StandaloneDraftWorker",
        )
    ),
    *(
        Seam(
            f"sglang.srt.speculative.{graphs}.execute",
            "watches what CUDA graphs draft",
            ["forward_batch"],
        )
        for graphs in (
            "eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
            "eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
        )
    ),
    Seam(f"{MODEL_RUNNER}.forward", "watches the drafted layers", ["forward_batch"]),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker._capture_cuda_graphs",
        "captures drafting together with its gate",
    ),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker.init_attention_backend",
        "gives graphs of other lengths an attention of their own",
    ),
    Seam(
        "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
        "captures drafts of several lengths",
        ["draft_attn_backend", "speculative_num_steps"],
    ),
    Seam(
        f"{DRAFT_EXTEND_GRAPHS}.resolve_num_tokens_per_req",
        "captures draft extend at the width of a tree's longest path",
        ["phase"],
    ),
    Seam(f"{MODEL_RUNNER}._decode_cuda_graph_runner_cls", "captures verification per token tier"),
    Seam(f"{MODEL_RUNNER}.max_decode_logits_rows", "makes room for padding rows in CUDA graphs"),
    Seam(f"{MODEL_RUNNER}.decode_num_tokens_per_req", "makes room for padding rows in CUDA graphs"),
    Seam(
        MODEL_RUNNER,
        "prepares the target for packed rows",
        fields=[
            "attn_backend",
            "decode_cuda_graph_runner",
            "device",
            "dtype",
            "max_running_requests",
            "model_config",
            "req_to_token_pool",
            "server_args",
        ],
    ),
    *(
        Seam(f"{DECODE_GRAPHS}.{name}", "captures verification per token tier")
        for name in (
            "ragged_verify_compact_graphs_enabled",
            "get_batch_sizes_to_capture",
            "DecodeCudaGraphRunner._build_ragged_verify_token_buckets",
            "DecodeCudaGraphRunner._ragged_capture_slots",
            "DecodeCudaGraphRunner._capture_one_stream",
            "DecodeCudaGraphRunner._autotune_buffers",
        )
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner",
        "captures verification per token tier",
        fields=[
            "attn_backend",
            "capture_bs",
            "captured_req_width",
            "device",
            "max_num_token",
            "_captured_ragged_layouts",
        ],
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner",
        "plans each replay on the host",
        fields=["_metadata_glue"],
        only_with=METADATA_GLUE,
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner._alloc_dummy_decode_buffers",
        "tunes kernels with graphs of fewer rows than requests times width",
        ["num_tokens_per_req"],
    ),
    Seam(
        "sglang.srt.utils.common.require_gathered_buffer",
        "knows whether row counts must be equal on all ranks",
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner.get_spec_info",
        "captures packed rows",
        ["num_tokens"],
    ),
    Seam(f"{KV_CACHE}.get_req_to_token_extra_context_len", "makes room behind the context limit"),
    Seam(f"{ALLOCATION}.get_alloc_reserve_per_decode", "makes room behind the context limit"),
    Seam(f"{GRAPH_BACKEND}.replay", "times graphs from where they begin"),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend.init_forward_metadata_out_graph",
        "plans packed rows for CUDA graphs",
        ["forward_batch", "in_capture"],
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend.init_cuda_graph_state",
        "allocates what graphs of packed rows read",
        ["max_bs", "max_num_tokens", "kv_indices_buf"],
    ),
    Seam(
        f"{FLASHINFER}.fast_prefill_plan",
        "plans packed rows without reading the device",
        ["qo_indptr_host", "kv_indptr_host", "kv_lens_host", "max_q_len", "max_kv_len"],
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend",
        "plans packed rows",
        fields=[
            "cuda_graph_custom_mask",
            "forward_metadata",
            "indices_updater_prefill",
            "max_context_len",
            "num_wrappers",
            "prefill_backend",
            "prefill_wrappers_verify",
            "req_to_token_pool",
            "supports_ragged_verify_graph",
            "workspace_buffer",
        ],
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend",
        "reads the slots of keys as they stand in the request table",
        fields=["kv_index_translator"],
        only_with=KV_INDEX_TRANSLATOR,
    ),
    Seam(
        f"{KV_INDEX_TRANSLATOR}.KVIndexTranslator",
        "reads the slots of keys as they stand in the request table",
        fields=["reads_are_translated"],
        only_with=KV_INDEX_TRANSLATOR,
    ),
    Seam(
        f"{FLASHINFER}.FlashInferIndicesUpdaterPrefill",
        "plans packed rows",
        fields=["num_qo_heads", "num_kv_heads", "head_dim", "q_data_type", "data_type"],
    ),
    Seam(
        f"{FLASHINFER}.PrefillMetadata",
        "plans packed rows",
        ["prefill_wrappers", "use_ragged", "extend_no_prefix"],
    ),
    Seam(
        f"{FLASHINFER}.DecodeMetadata",
        "tells draft rows their ancestors",
        fields=["decode_wrappers"],
    ),
    Seam(
        f"{FLASHINFER}.FlashInferMultiStepDraftBackend",
        "tells draft rows their ancestors",
        fields=["attn_backends"],
    ),
    Seam(
        FLASHINFER_PREFILL,
        "plans packed rows for CUDA graphs",
        [
            "float_workspace_buffer",
            "kv_layout",
            "use_cuda_graph",
            "qo_indptr_buf",
            "paged_kv_indptr_buf",
            "paged_kv_indices_buf",
            "paged_kv_last_page_len_buf",
            "custom_mask_buf",
            "mask_indptr_buf",
            "backend",
        ],
        fields=["_int_workspace_buffer", "_pin_memory_int_workspace_buffer"],
        only_with="flashinfer",
    ),
    Seam(
        FLASHINFER_PREFILL,
        "masks what tree nodes do not see",
        fields=["_custom_mask_buf", "_mask_indptr_buf"],
        only_with="flashinfer",
    ),
    Seam(
        f"{FLASHINFER_PREFILL}.begin_forward",
        "plans packed rows",
        ["q_data_type", "kv_data_type", "non_blocking"],
        only_with="flashinfer",
    ),
    Seam(
        FLASHINFER_DECODE,
        "tells draft rows their ancestors",
        fields=["_paged_kv_indptr_buf", "_paged_kv_indices_buf"],
        only_with="flashinfer",
    ),
    Seam("sglang.srt.runtime_context.get_parallel", "knows the tensor-parallel group"),
)


#: Through which newer SGLang tells its arguments: see hooks/hidden_keys.py.
TOLD_ARGUMENTS = (
    Seam(f"{SERVER_ARGS}.ServerArgs.resolved_dict", "hides keys", hook=True),
    Seam(
        "sglang.srt.utils.common.build_server_info",
        "hides keys",
        ["server_args", "scheduler_info"],
        hook=True,
    ),
)

_CHOICES = "add_{}deterministic_attention_backend_choices"

#: What makes SGLang's CPU engine run without its AMX kernels (`cpu/engine.py`); nothing else
#: needs them.
CPU_SEAMS: tuple[Seam, ...] = (
    Seam("sglang.srt.utils.common.cpu_has_amx_support", "knows which kernels are missing"),
    resolution_seam(ATTENTION_STEP, "keeps the attention backend of the CPU"),
    Seam(
        "sglang.srt.arg_groups.attention_hook._attention_backend_platform_fallbacks",
        "keeps the attention backend of the CPU",
        otherwise=Seam(
            f"{OVERRIDES}._attention_backend_platform_fallbacks",
            "keeps the attention backend of the CPU",
        ),
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        "brings an attention backend for the CPU",
    ),
    Seam(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory",
        "brings an attention backend for the CPU",
        fields=[
            "_create_intel_amx_decode_backend",
            "_create_intel_amx_prefill_backend",
            "_create_backend",
            "draft_model_runner",
            "topk",
            "speculative_num_steps",
        ],
    ),
    *(
        Seam(
            f"sglang.srt.arg_groups.choices.{name}",
            "draws by seed on a CPU",
            otherwise=Seam(f"{SERVER_ARGS}.{name}", "draws by seed on a CPU"),
        )
        for name in (_CHOICES.format(""), _CHOICES.format("radix_supported_"))
    ),
    Seam("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", "draws by seed on a CPU"),
    *(
        Seam(f"{module}.murmur_hash32", "draws by seed on a CPU")
        for module in ("sglang.kernels.ops.sampling.murmur_hash", "sglang.srt.layers.sampler")
    ),
    Seam(
        "sglang.srt.distributed.device_communicators.pynccl.NCCLLibrary",
        "leaves NCCL out on a CPU",
    ),
    *(
        Seam(f"sglang.srt.speculative.eagle_utils.{name}", "verifies with samples on a CPU")
        for name in ("eagle_sample", "verify_tree_greedy_func")
    ),
    Seam(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
        "brings an attention backend for the CPU",
        fields=["init_forward_metadata", "forward_extend", "forward_decode", "support_triton"],
    ),
    Seam(
        "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
        "reads sliding windows on a CPU",
        fields=["swa_layer_nums", "layers_mapping", "translate_loc_from_full_to_swa"],
    ),
)


def can_hide_keys() -> bool:
    """Whether this SGLang tells its arguments through functions that can be hooked."""
    return all(seam.defect() is None for seam in TOLD_ARGUMENTS)


def keys_are_hidden() -> bool:
    """Whether the hooks are in place that keep keys out of ``/server_info``."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return all(seam.target in HookRegistry._patched for seam in TOLD_ARGUMENTS)


def broken_seams(seams: Sequence[Seam] | None = None) -> list[str]:
    """One sentence per seam that this SGLang does not offer; empty when all fit."""
    return [
        f"SGLang {sglang_version()} does not offer the seam {seam.target}: {defect}; "
        f"C2T needs it because it {seam.purpose}"
        for seam in (SEAMS if seams is None else seams)
        if (defect := seam.defect()) is not None
    ]


def missing_hooks() -> list[str]:
    """One sentence per hook that SGLang's registry failed to apply; its errors are only logged."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [
        f"SGLang {sglang_version()} did not apply the hook on {seam.target}; "
        f"C2T needs it because it {seam.purpose}"
        for seam in map(Seam.chosen, SEAMS)
        if seam.hook and seam.target not in HookRegistry._patched
    ]


def require_seams(seams: Sequence[Seam] | None = None) -> None:
    """Raise :class:`SeamError` naming every broken seam."""
    defects = broken_seams(seams)
    if defects:
        raise SeamError("; ".join(defects))


def on_resolution(step: str, hook: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Run ``hook(server_args, previous)`` around a step of SGLang's argument resolution.

    Silent when the step is gone as well: :func:`missing_hooks` then names it.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def around(previous: Callable[[Any], None], server_args: Any) -> None:
            hook(server_args, previous)

        HookRegistry.register(STEP_FUNCTIONS[step], around, HookType.AROUND)
        return
    register_resolution_hook(step)(hook)


def resolved(server_args: Any) -> Any:
    """A view of the arguments with SGLang's own decisions applied."""
    overrides = importlib.import_module(OVERRIDES)
    view = getattr(overrides, "resolving_view", None) or overrides.resolved_view
    return view(server_args)


def argument(cfg: Any, name: str) -> Any:
    """A resolved server argument; :class:`SeamError` when this SGLang has none of that name.

    A refusal that silently found nothing to look at would let the combination through.
    """
    try:
        return getattr(cfg, name)
    except AttributeError as error:
        raise SeamError(
            f"SGLang {sglang_version()} has no server argument {name}; "
            "C2T checks it to refuse combinations it does not serve"
        ) from error


def require_readable(message: Any) -> None:
    """Raise ValueError unless a scheduler can read this message for it.

    Newer SGLang sends what was never checked, and reads it by its types: one wrong, and the
    scheduler ends. Older SGLang pickles. The prompt has been read by then, and is long.
    """
    io_struct = importlib.import_module(IO_STRUCT)
    if not hasattr(io_struct, "msgpack_encode"):
        return
    import msgspec

    skipped = {"input_ids", "input_embeds", "input_text", "mm_inputs", "token_type_ids"}
    unread = skipped.union({"time_stats"}).intersection(message.__struct_fields__)
    light = msgspec.structs.replace(message, **dict.fromkeys(unread))
    try:
        io_struct.msgpack_decode(io_struct.msgpack_encode(light))
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        # Messages travel as arrays: a number in place of the field's name, and a tag at 0.
        place = re.search(r"`\$\[(\d+)\]", str(error))
        field = message.__struct_fields__[int(place[1]) - 1] if place else "the request"
        raise ValueError(f"{field} cannot be read: {error}") from error


def draft_shape(server_args: Any) -> TreeShape:
    """What drafts of a server look like."""
    cfg = resolved(server_args)
    return TreeShape(
        argument(cfg, "speculative_eagle_topk"),
        argument(cfg, "speculative_num_steps"),
        argument(cfg, "speculative_num_draft_tokens"),
    )


def accepts_exactly(cfg: Any) -> bool:
    """Whether a draft is accepted with the target's own probability: thresholds of 1."""
    thresholds = "speculative_accept_threshold_single", "speculative_accept_threshold_acc"
    return all(argument(cfg, name) == 1.0 for name in thresholds)


def uses_dp_attention(cfg: Any) -> bool:
    """Whether attention is data parallel: asked for by its size, in older SGLang by a flag."""
    if hasattr(cfg, "attn_dp_size") and cfg.attn_dp_size > 1:
        return True
    return bool(argument(cfg, "enable_dp_attention"))


def watermarks(cfg: Any) -> bool:
    """Whether sampling watermarks the output; never in an SGLang that knows no watermarks."""
    try:
        importlib.import_module(WATERMARKING)
    except ImportError:
        return False
    return bool(argument(cfg, "watermark_config"))


def decode_graphs_enabled(cfg: Any) -> bool:
    """Whether resolved arguments ask for CUDA graphs in decode."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return bool(cfg.cuda_graph_config.decode.backend != Backend.DISABLED)


def bundles_draft(cfg: Any) -> bool:
    """Whether SGLang takes draft layers out of the target's own checkpoint (MTP): as a draft
    the target's path then stands for another architecture.
    """
    from sglang.srt.configs.model_config import ModelConfig

    target, draft = (
        ModelConfig.from_server_args(cfg, is_draft_model=as_draft).hf_config.architectures
        for as_draft in (False, True)
    )
    return bool(target != draft)


def simulates_acceptance() -> bool:
    """Whether SGLANG_SIMULATE_ACC_LEN replaces real acceptance."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_SIMULATE_ACC_LEN.get() > 0)


def plans_on_another_stream() -> bool:
    """Whether verification is planned on a stream of its own, before the draft is known."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())


def has_recurrent_state(model_config: Any) -> bool:
    """Whether the model is a Mamba / linear-attention hybrid, with state per verified row."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def verify_tree_greedy(**tables: Any) -> Any:
    """SGLang's acceptance kernel for this platform: (predicts, accept_index, accept_token_num)."""
    from sglang.srt.speculative import eagle_utils

    return eagle_utils.verify_tree_greedy_func(**tables)


@contextmanager
def writing_rows(verify_input: Any, locs: Tensor) -> Iterator[None]:
    """``eagle_prepare_for_verify`` binds the rows of ``verify_input`` to ``locs`` [T] int64.

    By itself it would bind ``draft_token_num`` rows of each request.
    """
    if hasattr(verify_input, "prepared_out_cache_loc"):
        # Else the plan would bind the full window again.
        write(verify_input, prepared_out_cache_loc=locs, kv_loc_plan=None)
        yield
        return
    module, name = importlib.import_module(CACHE_LOCS), "assign_extend_cache_locs_uniform_func"
    bound = []

    def assign(**_uniform: Any) -> Tensor:
        bound.append(locs)
        return locs

    with swapped(module, name, assign):
        yield
    assert bound, f"SGLang bound the rows to verify without {CACHE_LOCS}.{name}"


@contextmanager
def rotating_rows(
    verify_input: Any, positions: Tensor, pack: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """M-RoPE targets: the forward batch made inside the block for ``verify_input`` [T] gets what
    SGLang computes for all rows' ``positions`` [B * N], [3, B * N], put through ``pack``: [3, T].

    By itself it takes equally many rows of each request for granted.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    if hasattr(verify_input, "prepared_mrope_positions"):
        write(verify_input, prepared_mrope_positions=None)  # they would be taken as they are
    compute = ForwardBatch.compute_spec_mrope_positions

    def compute_packed(forward_batch: Any, model_runner: Any, batch: Any) -> None:
        compute(forward_batch, model_runner, batch, seq_positions=positions)
        write(forward_batch, mrope_positions=pack(forward_batch.mrope_positions))

    with swapped(ForwardBatch, "compute_spec_mrope_positions", compute_packed):
        yield


def widen_request_table() -> None:
    """Rows of ``req_to_token`` made from now on hold all that SGLang reserves for a step.

    It reserves twice what a step may write, but leaves room for a tree's rows only: near the
    context limit the rest lands in the row of another request.
    """
    wrap_global(KV_CACHE, "get_req_to_token_extra_context_len", _room_for_all_reserved)


def _room_for_all_reserved(original: Callable[..., int], *args: Any) -> int:
    sizing = importlib.import_module(ALLOCATION)
    return max(original(*args), sizing.get_alloc_reserve_per_decode(*args))


@contextmanager
def before_replay(target_runner: Any, action: Callable[[], None]) -> Iterator[None]:
    """A CUDA graph of the target that is replayed inside the block begins with ``action()``."""
    graphs = target_runner.decode_cuda_graph_runner
    if graphs is None:
        yield
        return
    replay = graphs.backend.replay

    def announced(*args: Any, **kwargs: Any) -> Any:
        action()
        return replay(*args, **kwargs)

    with swapped(graphs.backend, "replay", announced):
        yield


def set_output_stride(result: Any, stride: int) -> None:
    """Say that ``result.next_token_ids`` holds ``stride`` tokens per request."""
    if hasattr(result, "speculative_output_stride"):
        write(result, speculative_output_stride=stride)
    else:
        write(result, speculative_num_draft_tokens=stride)


@contextmanager
def draft_extend_width(width: int) -> Iterator[None]:
    """CUDA graphs of draft extend captured inside the block take ``width`` rows per request."""
    with swapped(
        importlib.import_module(DRAFT_EXTEND_GRAPHS),
        "resolve_num_tokens_per_req",
        lambda **_: width,
    ):
        yield


def target_hidden_width(draft_runner: Any) -> int:
    """Columns of the target's hidden states that the draft reads: of several layers for EAGLE3."""
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    return int(get_draft_input_from_target_hidden_dim(draft_runner))


def request_slot(req: Any) -> int:
    """The row of a running request in SGLang's ``req_to_token`` table."""
    slot = req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx
    assert slot is not None, f"request {req.rid} has no slot"
    return int(slot)


def is_flashinfer(backend: Any) -> bool:
    """Whether an attention backend is FlashInfer's. By name: importing it needs FlashInfer."""
    return any(cls.__name__ == "FlashInferAttnBackend" for cls in type(backend).__mro__)


def flashinfer_counts_rows() -> bool:
    """Whether FlashInfer's planner sizes partial outputs by rows, as its source says; older ones
    by (row, query head of the group) pairs, which is never less.
    """
    import flashinfer

    source = Path(flashinfer.__file__).parent / "data/include/flashinfer/attention/scheduler.cuh"
    return source.is_file() and "max_partial_rows" in source.read_text()


def gathers_rows(server_args: Any) -> bool:
    """Whether ranks exchange rows inside the model (MoE all-to-all, smaller dense groups).

    SGLang then agrees on row counts, multiples of the ranks, before it forwards.
    """
    from sglang.srt.utils.common import require_gathered_buffer as gathers

    return bool(gathers(server_args) if "server_args" in _parameters(gathers) else gathers())


def reads_packed_rows(backend: Any) -> bool:
    """Whether an attention backend is known to read a ``RaggedVerifyLayout``: ours for the CPU
    says so, and FA3's (and FA4's) takes the layouts of DSPARK.
    """
    if getattr(backend, "supports_ragged_verify_eager", False):
        return True
    return type(backend).__name__ == "FlashAttentionBackend" and backend.topk <= 1


def attention_fallback() -> tuple[ModuleType, str]:
    """The module global through which :data:`ATTENTION_STEP` leaves a CPU's own backend."""
    name = "_attention_backend_platform_fallbacks"
    try:  # it imports the function when it is loaded, older SGLang when the step runs
        return importlib.import_module("sglang.srt.arg_groups.attention_hook"), name
    except ImportError:
        return importlib.import_module(OVERRIDES), name


def backend_choices() -> ModuleType:
    """The module that keeps SGLang's lists of attention backends."""
    try:
        return importlib.import_module("sglang.srt.arg_groups.choices")
    except ImportError:
        return importlib.import_module(SERVER_ARGS)


def made_backend(factory: Any, name: str, backend: Any) -> Any:
    """What a method of SGLang's ``DraftBackendFactory`` returns for a backend that it made.

    Newer SGLang wants its name with it, to stamp it on the backend's steps.
    """
    return (name, backend) if "stamps_children" in _parameters(factory._create_backend) else backend


def uses_mla(server_args: Any) -> bool:
    """Whether the target's attention is MLA."""
    try:
        from sglang.srt.arg_groups.attention_hook import use_mla_backend
    except ImportError:
        return bool(server_args.use_mla_backend())
    return bool(use_mla_backend(server_args))


def supply_seed_hash(torch_hash: Callable[..., Any]) -> bool:
    """Have seeded sampling on a CPU hash with ``torch_hash(seed, positions, col_indices)``.

    Returns False, and does nothing, where SGLang's function looks for a CPU op by itself;
    older SGLang only has a Triton kernel.
    """
    from sglang.kernels.ops.sampling import murmur_hash

    if "murmur_hash32_cpu" in murmur_hash.murmur_hash32.__code__.co_names:
        return False
    from sglang.srt.layers import sampler

    for module in (murmur_hash, sampler):
        write(module, murmur_hash32=torch_hash)
    return True


def without_sampling_masks(info: Any) -> Any:
    """Have the sampler leave out the support masks it would return per request; ``info``."""
    if hasattr(info, "sampling_mask_batch_indices"):
        write(info, sampling_mask_batch_indices=None)
    write(info, return_sampling_masks=None)  # what older SGLang reads
    return info


def plan_every_replay(graph_runner: Any) -> None:
    """Have SGLang prepare every replay of a decode graph on the host.

    Newer SGLang may record the preparation in a graph of its own, which would freeze what our
    attention plans read there.
    """
    if _exists(METADATA_GLUE):
        write(graph_runner, _metadata_glue=None)


def sglang_version() -> str:
    """Version of the installed SGLang."""
    from importlib.metadata import version

    return version("sglang")


def wrap_global(module_name: str, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``module.name`` by ``wrapper(original, ...)``, once per process.

    For functions that upstream calls through a module global; SGLang's hook registry
    would import the module in every process, also in those that never verify.
    """
    module = importlib.import_module(module_name)
    original = _present(module, name)
    if getattr(original, "c2t_wrapper", None) is wrapper:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.c2t_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(module, name, wrapped)


def write(owner: Any, **values: Any) -> None:
    """``owner.name = value`` for each of them, on an object or module of SGLang or FlashInfer.

    Raises :class:`SeamError` where nothing of that name is there: it would not be read.
    """
    for name, value in values.items():
        _present(owner, name)
        setattr(owner, name, value)


def _present(owner: Any, name: str) -> Any:
    """``owner.name``; :class:`SeamError` where upstream has no such thing."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        what = getattr(owner, "__name__", type(owner).__qualname__)
        seams = (*SEAMS, *CPU_SEAMS)
        purposes = [s.purpose for s in seams if name in (*s.fields, s.target.rpartition(".")[2])]
        raise SeamError(
            f"SGLang {sglang_version()} has no {name} on {what}; "
            f"C2T needs it because it {(purposes or ['writes it'])[0]}"
        ) from error


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block; :class:`SeamError` if it was not there."""
    original = _present(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)

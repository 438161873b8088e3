"""The seams: every place in SGLang and FlashInfer we hold on to, and what for.

SGLang's plugin loader logs and swallows exceptions, so a seam that moved would leave a
server that looks right and runs without C2T. Therefore each is listed here, and ``--c2t``
refuses to start when one is missing. Where a seam moved between the releases we serve, both
places are listed, and the functions of ``compat.py`` take the one that is there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from sglang_c2t.srt.probes import Seam, SeamError, sglang_version

EAGLE_WORKER = "sglang.srt.speculative.eagle_worker_v2"
DRAFT_EXTEND_GRAPHS = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"
DECODE_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
KV_CACHE = "sglang.srt.mem_cache.kv_cache_configurator"
ALLOCATION = "sglang.srt.mem_cache.allocation_sizing"
GRAPH_BACKEND = (
    "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend.BaseCudaGraphBackend"
)
MLA_MODELS = "sglang.srt.models.deepseek_common.attention_backend_handler"
FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend"
FLASH_ATTENTION = "sglang.srt.layers.attention.flashattention_backend"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
STANDALONE_WORKER = "sglang.srt.speculative.standalone_worker_v2"
EAGLE_COMMON = "sglang.srt.speculative.eagle_worker_common"
EAGLE_UTILS = "sglang.srt.speculative.eagle_utils"
EAGLE_DISAGGREGATION = "sglang.srt.speculative.eagle_disaggregation"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
EAGLE_INFO = "sglang.srt.speculative.eagle_info"
FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
CACHE_LOCS = "sglang.kernels.ops.speculative.cache_locs"
ATTENTION_HOOK = "sglang.srt.arg_groups.attention_hook"
OVERRIDES = "sglang.srt.arg_groups.overrides"
RESOLUTION_HOOKS = "sglang.srt.arg_groups.resolution_hooks"
SERVER_ARGS = "sglang.srt.server_args"
SPECULATIVE_HOOK = "sglang.srt.arg_groups.speculative_hook"
AUTH = "sglang.srt.utils.auth"
IO_STRUCT = "sglang.srt.managers.io_struct"
WATERMARKING = "sglang.srt.sampling.watermarking"
METADATA_GLUE = "sglang.srt.model_executor.runner.metadata_glue_graph"
KV_INDEX_TRANSLATOR = "sglang.srt.mem_cache.kv_index_translator"
RAGGED_VERIFY = "sglang.srt.speculative.ragged_verify"
FLASH_ATTENTION = "sglang.srt.layers.attention.flashattention_backend"
SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"
SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
FLASHINFER_MLA = "sglang.srt.layers.attention.flashinfer_mla_backend"
FLASHINFER_LATENTS = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
FLASHINFER_PREFILL = "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper"
FLASHINFER_DECODE = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"
# Hook targets, named once: plugin.py registers on them, the probes below look them up.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
SPEC_METRICS = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"
)
UPDATE_FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
SET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.set_internal_state"
ASK_INTERNAL_STATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.set_internal_state"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"
VALIDATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
UPDATE_WEIGHTS = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.update_weights_from_disk"
)
#: Of these the last two are newer SGLang's.
WEIGHT_REQUESTS = tuple(
    Seam(f"{UPDATE_WEIGHTS.rpartition('.')[0]}.{name}", "answers failed updates of weights",
         "recv_req", hook=True)
    for name in ("update_weights_from_tensor", "update_weights_from_distributed",
                 "update_weights_from_ipc", "begin_weight_update", "end_weight_update")
)  # fmt: skip
WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
CONFIGURE_LOGGING = "sglang.srt.managers.tokenizer_manager.TokenizerManager.configure_logging"
RECORD_EXPERTS = tuple(
    f"sglang.srt.managers.tokenizer_manager.TokenizerManager.{what}_expert_distribution_record"
    for what in ("start", "stop", "dump")
)
WAITS = tuple(
    f"sglang.srt.managers.tokenizer_manager.TokenizerManager.{name}"
    for name in (
        "init_weights_update_group",
        "init_weights_send_group_for_remote_instance",
        "send_weights_to_remote_instance",
    )
)
SHARES_BUFFERS = "has draft graphs of fewer layers use the buffers of those of all"
#: FastAPI's, which calls it by its global name.
READ_BODY = "fastapi.routing", "solve_dependencies"
CREATE_MESSAGE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
NORMALIZE_REQUEST = f"{IO_STRUCT}.GenerateReqInput.normalize_batch_and_arguments"
VERIFY_SAMPLING_PARAMS = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
INIT_DISAGGREGATION = "sglang.srt.managers.scheduler.Scheduler.init_disaggregation"
LORA_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
#: What of it pins memory.
PINS_ADAPTERS = tuple(
    f"{LORA_MANAGER}.{name}"
    for name in (
        "__init__",
        "load_lora_adapter",
        "load_lora_adapter_from_tensors",
        "prepare_lora_batch",
    )
)
RESOLVE_RESULT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
)
LOG_STATS = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats"
MODEL_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
#: Attention backends that may read packed rows, by SGLang's name; verify/backends.py asks the
#: backend itself once it exists, and verify/trial.py tries it.
RAGGED_BACKENDS = (
    "fa3", "fa4", "flashinfer", "trtllm_mha", "trtllm_mla", "dsv4", "intel_amx",
)  # fmt: skip
#: Attention backends that read our tree masks, by SGLang's name; the CPU one is ours, see
#: cpu/engine.py.
TREE_BACKENDS = ("flashinfer", "intel_amx")
#: Steps of SGLang's argument resolution that we wrap, by the names of its resolution hooks,
#: and the functions that are these steps in an SGLang without resolution hooks, newest first.
SPECULATIVE_STEP = "handle_speculative_decoding"
ATTENTION_STEP = "handle_attention_backend_compatibility"
STEP_FUNCTIONS = {
    SPECULATIVE_STEP: (f"{SPECULATIVE_HOOK}.{SPECULATIVE_STEP}",),
    ATTENTION_STEP: (
        f"{ATTENTION_HOOK}.{ATTENTION_STEP}",
        f"{SERVER_ARGS}.ServerArgs._{ATTENTION_STEP}",
    ),
}


def step_seam(step: str, purpose: str = "") -> Seam:
    """The function that is this step in an SGLang without resolution hooks."""
    *newer, oldest = (Seam(function, purpose, hook=True) for function in STEP_FUNCTIONS[step])
    return functools.reduce(lambda old, new: replace(new, otherwise=old), reversed(newer), oldest)


def resolution_seam(step: str, purpose: str) -> Seam:
    """What :func:`on_resolution` holds on to for this step."""
    return Seam(
        f"{RESOLUTION_HOOKS}.register_resolution_hook",
        purpose,
        "name",
        otherwise=step_seam(step, purpose),
    )


_UPDATES = "updates the target's weights alone"
_ADAPTS = "tells LoRA adapters of packed rows"
_TRIES = "tries packed rows before anybody is served"

SEAMS: tuple[Seam, ...] = (
    Seam(ADD_CLI_ARGS, "adds the --c2t flags", "parser", hook=True),
    Seam(FROM_CLI_ARGS, "reads the --c2t flags", "args", hook=True),
    Seam(CREATE_WORKER, "swaps in the C2T worker", "server_args", hook=True),
    Seam(SPEC_METRICS, "corrects spec_accept_rate", "meta_info recv_obj i", hook=True),
    Seam(UPDATE_FINISH, "counts reasoning up to the end of an answer", hook=True),
    Seam(INTERNAL_STATE, "reports counters in /server_info", "recv_req", hook=True),
    Seam(UPDATE_WEIGHTS, _UPDATES, "recv_req", hook=True),
    Seam(UPDATE_WEIGHTS.rpartition(".")[0], _UPDATES, fields="tp_worker draft_worker"),
    Seam(f"{WEIGHT_UPDATER}.update_weights_from_disk", _UPDATES, "model_path load_format"),
    Seam(WEIGHT_UPDATER, _UPDATES, fields="model_config"),
    *WEIGHT_REQUESTS[:3],
    Seam("sglang.srt.configs.model_config.ModelConfig", _UPDATES, fields="model_path"),
    Seam(CONFIGURE_LOGGING, "refuses what ends request logging", "obj", hook=True),
    *(Seam(target, "refuses what ends a scheduler", hook=True) for target in RECORD_EXPERTS),
    *(Seam(target, "asks for an admin key", "obj request", hook=True) for target in WAITS),
    Seam(SET_INTERNAL_STATE, "changes the policy of a running server", "recv_req", hook=True),
    Seam(TOKENIZER_MANAGER, "answers /c2t", hook=True),
    Seam(f"{TOKENIZER_MANAGER.removesuffix('.__init__')}.get_internal_state", "answers /c2t"),
    Seam(ASK_INTERNAL_STATE, "lets nobody but /c2t change the policy", "obj", hook=True),
    Seam(f"{AUTH}.auth_level", "protects /c2t", "level"),
    Seam(f"{IO_STRUCT}.SetInternalStateReq", "answers /c2t", "server_args"),
    Seam(f"{IO_STRUCT}.SetInternalStateReqOutput", "answers /c2t", "updated"),
    Seam(VERIFY_SAMPLING_PARAMS, "checks who opts out", hook=True),
    Seam(VALIDATE_REQUEST, "refuses what would end the server", "obj input_ids", hook=True),
    Seam(".".join(READ_BODY), "answers what cannot be read with 400"),
    Seam(CREATE_MESSAGE, "refuses what would end the server", "obj input_ids", hook=True),
    Seam(NORMALIZE_REQUEST, "refuses what would end the server", hook=True),
    Seam(RESOLVE_RESULT, "counts what was verified", "batch result", hook=True),
    Seam(LOG_STATS, "corrects sglang:spec_accept_rate", "stats", hook=True),
    resolution_seam(SPECULATIVE_STEP, "refuses unsupported combinations before a model loads"),
    Seam(
        f"{OVERRIDES}.resolving_view",
        "reads resolved server arguments",
        otherwise=Seam(f"{OVERRIDES}.resolved_view", "reads resolved server arguments"),
    ),
    Seam(
        f"{OVERRIDES}.declare_resolution",
        "lets more requests run than SGLang does under speculation",
        "server_args source",
        otherwise=Seam(
            f"{SERVER_ARGS}.ServerArgs",
            "lets more requests run than SGLang does under speculation",
            fields="max_running_requests",
        ),
    ),
    Seam(
        f"{SPECULATIVE_HOOK}._auto_choose_speculative_params",
        "drafts chains where SGLang chooses trees by itself",
        "server_args model_arch",
    ),
    Seam(
        "sglang.srt.configs.model_config.ModelConfig.from_server_args",
        "learns whether the target's checkpoint holds a draft",
        "server_args is_draft_model",
    ),
    Seam(f"{EAGLE_WORKER}.EAGLEWorkerV2", "worker of EAGLE, EAGLE3 and NEXTN"),
    Seam(f"{EAGLE_WORKER}.EAGLEWorkerV2.verify", "cuts drafts before verification", "batch"),
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
        "forward_batch",
    ),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker._draft_extend_for_prefill",
        "measures the first drafted token after a prefill",
        "batch",
    ),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker._draft_extend_for_decode",
        "measures the first drafted token after a verification",
        "batch batch_result",
    ),
    Seam(
        f"{EAGLE_WORKER}.EagleDraftWorker.alloc_memory_pool",
        "sizes the per-request table",
        "req_to_token_pool",
    ),
    Seam(
        f"{EAGLE_DISAGGREGATION}.build_eagle_disagg_draft_input",
        "sees requests come whose prefill ran on another server",
        "batch",
    ),
    Seam(f"{STANDALONE_WORKER}.StandaloneWorkerV2", "worker of STANDALONE"),
    Seam(f"{STANDALONE_WORKER}.StandaloneDraftWorker", "draft worker of STANDALONE"),
    Seam(
        f"{EAGLE_COMMON}.eagle_prepare_for_verify",
        "hands the target a packed batch",
        "verify_input req_to_token_pool batch target_worker",
    ),
    Seam(f"{EAGLE_COMMON}.run_eagle_verify", "calls what packs and accepts by its global name"),
    Seam(
        f"{EAGLE_INFO}.EagleVerifyInput",
        "is cut and packed",
        fields="draft_token positions retrieve_index retrieve_next_token retrieve_next_sibling "
        "draft_token_num max_tree_depth tree_topk custom_mask ragged_verify_layout",
    ),
    Seam(
        f"{EAGLE_INFO}.EagleVerifyInput",
        "says where the packed rows are written",
        fields="prepared_out_cache_loc kv_loc_plan",
        otherwise=Seam(
            f"{EAGLE_UTILS}._PREPARE_FOR_VERIFY_DEPS",
            "says where the packed rows are written",
            otherwise=Seam(
                f"{CACHE_LOCS}.assign_extend_cache_locs_uniform_func",
                "says where the packed rows are written",
                "req_pool_indices start_offset draft_token_num",
            ),
        ),
    ),
    Seam(
        f"{FORWARD_BATCH}.compute_spec_mrope_positions",
        "packs the positions of M-RoPE targets",
        "model_runner batch seq_positions",
    ),
    Seam(
        # An older SGLang prepares none, and has no field that a rename could hide.
        f"{EAGLE_INFO}.EagleVerifyInput",
        "packs the positions of M-RoPE targets",
        fields="prepared_mrope_positions",
        otherwise=Seam(
            f"{CACHE_LOCS}.assign_extend_cache_locs_uniform_func",
            "packs the positions of M-RoPE targets",
        ),
    ),
    Seam(
        f"{EAGLE_WORKER}.select_top_k_tokens",
        "chooses which nodes of a tree are expanded",
        "i topk_p topk_index hidden_states scores topk",
    ),
    Seam(
        f"{EAGLE_WORKER}.organize_draft_results",
        "chooses which nodes of a tree are verified",
        "score_list token_list parents_list num_draft_token",
    ),
    Seam(
        f"{EAGLE_WORKER}.build_eagle_verify_input",
        "builds the verify input of differently shaped trees",
        "batch draft_input parent_list top_scores_index draft_tokens",
    ),
    Seam(f"{EAGLE_WORKER}.EagleDraftWorker.draft", "calls it by its global name", "batch"),
    Seam(
        f"{EAGLE_COMMON}.eagle_sample",
        "samples a token per row of a tree, then matches",
        "verify_input batch logits_output grammar_mask",
    ),
    Seam(
        f"{EAGLE_COMMON}._finalize_accept_tree_path",
        "moves the accepted path of a tree to the front",
        "batch accept_index accept_lens predict logits_output token_to_kv_pool_allocator "
        "num_draft_tokens",
    ),
    Seam(
        "sglang.srt.constrained.base_grammar_backend.GrammarMask",
        "constrains the rows of a tree",
        fields="vocab_mask",
    ),
    Seam("sglang.srt.layers.sampler.create_sampler", "samples as plain decoding does"),
    Seam(
        "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        "penalises each row",
        "logits scaling_penalties",
    ),
    Seam(
        "sglang.srt.sampling.sampling_params.SamplingParams",
        "penalises each row",
        fields="frequency_penalty presence_penalty repetition_penalty min_new_tokens "
        "stop_token_ids",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "penalises each row",
        fields="rid origin_input_ids output_ids sampling_params custom_logit_processor "
        "retraction_count",
    ),
    Seam(
        "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer",
        "knows which tokens end an answer",
        "orchestrator",
        fields="_prepare stop_token_penalties",
    ),
    Seam(
        SAMPLING_INFO,
        "asks logit processors for each row",
        fields="has_custom_logit_processor custom_logit_processor custom_params",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.FINISH_ABORT",
        "refuses logit processors that count their calls",
        "message status_code err_type",
    ),
    Seam(f"{SCHEDULE_BATCH}.Req", "refuses such processors", fields="to_finish"),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "counts reasoning up to the end of an answer",
        fields="reasoning_tokens output_ids_through_stop",
    ),
    Seam(
        TOKENIZER_MANAGER.removesuffix(".__init__"),
        "says what is kept free for drafts",
        fields="num_reserved_tokens server_args",
    ),
    Seam("sglang.srt.utils.async_probe.sanitize_nan_logits", "guards sampling"),
    Seam(
        f"{RAGGED_VERIFY}.RaggedVerifyLayout",
        "tells attention the rows of each request",
        fields="verify_lens verify_lens_cpu bs graph_num_tokens extend_start_loc qo_indptr_device",
    ),
    Seam(
        f"{RAGGED_VERIFY}.RaggedTargetVerifyGeometry",
        "tells attention the rows and keys of each slot",
        "cache_seqlens_int32 cu_seqlens_q cu_seqlens_k max_seq_len_q",
    ),
    Seam(
        f"{FLASH_ATTENTION}.build_ragged_target_verify_geometry",
        "tells attention the rows and keys of each slot",
        "seq_lens layout",
        on_gpu=True,  # it imports SGLang's kernels
    ),
    Seam(
        f"{RAGGED_VERIFY}.RaggedVerifyLayout.from_verify_lens",
        "captures packed rows",
        "verify_lens_cpu device grid",
    ),
    Seam(
        f"{RAGGED_VERIFY}.RaggedVerifyLayout.padded_to_bucket",
        "tells attention the rows of each slot",
        "padded_bs cap",
    ),
    Seam(
        f"{EAGLE_UTILS}.get_draft_input_from_target_hidden_dim",
        "compiles what packing launches before a request waits for it",
        "model_runner",
    ),
    Seam(
        f"{RAGGED_VERIFY}.build_capture_verify_lens",
        "captures packed rows",
        "num_tokens num_slots num_draft_tokens",
    ),
    Seam(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "carries verify lengths to meta_info and labels to recordings",
        fields="accept_lens cap_lens logits_output next_token_ids num_cap_tokens",
    ),
    Seam(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "tells how many tokens a row of results holds",
        fields="speculative_output_stride",
        otherwise=Seam(
            "sglang.srt.managers.utils.GenerationBatchResult",
            "tells how many tokens a row of results holds",
            fields="speculative_num_draft_tokens",
        ),
    ),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "measures drafted tokens",
        fields="next_token_logits hidden_states",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        "knows the requests of a step",
        fields="reqs seq_lens req_pool_indices req_to_token_pool forward_mode sampling_info "
        "return_logprob",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        "hands the target a packed batch",
        fields="spec_info out_cache_loc",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch.init_new",
        "measures at the start what steps cost",
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache model_config enable_overlap "
        "spec_algorithm",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        "measures at the start what steps cost",
        fields="forward_mode req_pool_indices seq_lens seq_lens_cpu seq_lens_sum orig_seq_lens "
        "multimodal_inputs sampling_info spec_info",
    ),
    Seam(f"{EAGLE_COMMON}.eagle_prepare_for_verify", _TRIES),
    Seam(f"{EAGLE_COMMON}.build_eagle_verify_input", _TRIES, "tree_mask_mode target_worker device"),
    Seam(f"{EAGLE_INFO}.EagleDraftInput", _TRIES, fields="bonus_tokens"),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        _TRIES,
        "batch forward_batch is_verify",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.BaseTokenToKVPoolAllocator",
        _TRIES,
        fields="alloc clear page_size",
    ),
    Seam(f"{MODEL_RUNNER}.init_decode_cuda_graph", _TRIES),
    Seam(
        SAMPLING_INFO,
        "measures at the start what steps cost",
        "temperatures top_ps top_ks min_ps is_all_greedy is_any_greedy need_top_p_sampling "
        "need_top_k_sampling need_min_p_sampling vocab_size device",
    ),
    Seam(
        f"{EAGLE_INFO}.EagleDraftInput",
        "measures at the start what steps cost",
        "topk_p topk_index hidden_states bonus_tokens",
    ),
    Seam(
        f"{EAGLE_UTILS}.get_draft_recurrent_hidden_state_spec",
        "measures at the start what steps cost",
        "model_runner",
    ),
    Seam(
        f"{EAGLE_WORKER}.EAGLEWorkerV2.forward_batch_generation",
        "measures at the start what steps cost",
        "batch",
    ),
    Seam(
        f"{EAGLE_WORKER}.EAGLEWorkerV2",
        "measures at the start what steps cost",
        fields="draft_worker req_to_token_pool token_to_kv_pool_allocator speculative_algorithm "
        "device topk",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "names requests and prompts in recordings",
        "rid origin_input_ids sampling_params",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "learns nothing from requests that change the target's distribution",
        fields="sampling_params custom_logit_processor",
    ),
    Seam(
        "sglang.srt.sampling.sampling_params.SamplingParams",
        "learns nothing from requests that change the target's distribution",
        "json_schema regex ebnf structural_tag frequency_penalty presence_penalty "
        "repetition_penalty min_new_tokens logit_bias temperature",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "knows how long contexts are",
        fields="origin_input_ids output_ids",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "counts what was verified",
        fields="spec_verify_ct spec_num_cap_tokens spec_num_correct_drafts",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.Req",
        "finds a request's row in the table of KV slots",
        fields="kv",
        otherwise=Seam(
            f"{SCHEDULE_BATCH}.Req",
            "finds a request's row in the table of KV slots",
            fields="req_pool_idx",
        ),
    ),
    Seam(
        SAMPLING_INFO,
        "samples a token per row",
        fields="temperatures top_ps top_ks min_ps sampling_seed grammars "
        "has_custom_logit_processor is_all_greedy acc_additive_penalties acc_scaling_penalties "
        "logit_bias",
    ),
    Seam(
        SAMPLING_INFO,
        "leaves out the support masks of packed rows",
        fields="sampling_mask_batch_indices",
        otherwise=Seam(
            SAMPLING_INFO,
            "leaves out the support masks of packed rows",
            fields="return_sampling_masks",
        ),
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "plans the attention of packed rows",
        fields="batch_size input_ids seq_lens seq_lens_cpu req_pool_indices spec_info forward_mode "
        "mrope_positions",
    ),
    Seam(
        "sglang.srt.observability.metrics_collector.SchedulerStats",
        "corrects sglang:spec_accept_rate",
        fields="spec_accept_rate spec_accept_length spec_cap_length",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
        "counts what was verified",
        fields="current_scheduler_metrics_enabled metrics_collector",
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "is timed while it verifies",
        "forward_batch",
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker",
        "prepares the target for packed rows",
        fields="model_runner",
    ),
    Seam(
        f"{EAGLE_WORKER}.EAGLEWorkerV2",
        "knows the size of drafts",
        fields="server_args target_worker _draft_worker topk speculative_num_steps "
        "speculative_num_draft_tokens",
    ),
    *(
        Seam(
            worker,
            "drafts several numbers of layers, each with its CUDA graphs and attention",
            fields="draft_runner server_args req_to_token_pool device topk hot_token_id "
            "speculative_num_steps speculative_num_draft_tokens cuda_graph_runner "
            "cuda_graph_runner_for_draft_extend draft_attn_backend draft_extend_attn_backend",
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
            "forward_batch",
        )
        for graphs in (
            "eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
            "eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
        )
    ),
    Seam(f"{MODEL_RUNNER}.forward", "watches the drafted layers", "forward_batch"),
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
        "draft_attn_backend speculative_num_steps",
    ),
    Seam(
        f"{DRAFT_EXTEND_GRAPHS}.resolve_num_tokens_per_req",
        "captures draft extend at the width of a tree's longest path",
        "phase",
    ),
    Seam(f"{MODEL_RUNNER}._decode_cuda_graph_runner_cls", "captures verification per token tier"),
    Seam(f"{MODEL_RUNNER}.max_decode_logits_rows", "makes room for padding rows in CUDA graphs"),
    Seam(f"{MODEL_RUNNER}.decode_num_tokens_per_req", "makes room for padding rows in CUDA graphs"),
    Seam(
        MODEL_RUNNER,
        "prepares the target for packed rows",
        fields="attn_backend decode_cuda_graph_runner device dtype max_running_requests "
        "model_config req_to_token_pool server_args",
    ),
    *(
        Seam(f"{DECODE_GRAPHS}.{name}", "captures verification per token tier")
        for name in (
            "ragged_verify_compact_graphs_enabled",
            "get_batch_sizes_to_capture",
            "DecodeCudaGraphRunner._build_ragged_verify_token_buckets",
            "DecodeCudaGraphRunner._ragged_capture_slots",
            "DecodeCudaGraphRunner._can_run_ragged_verify_graph",
            "DecodeCudaGraphRunner._stage_ragged_verify_layout",
            "DecodeCudaGraphRunner._capture_one_stream",
            "DecodeCudaGraphRunner._autotune_buffers",
        )
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner",
        "captures verification per token tier",
        fields="attn_backend capture_bs captured_req_width device max_num_token "
        "_captured_ragged_layouts",
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner",
        "plans each replay on the host",
        fields="_metadata_glue",
        only_with=METADATA_GLUE,
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner._alloc_dummy_decode_buffers",
        "tunes kernels with graphs of fewer rows than requests times width",
        "num_tokens_per_req",
    ),
    Seam(
        "sglang.srt.utils.common.require_gathered_buffer",
        "knows whether row counts must be equal on all ranks",
    ),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner.get_spec_info",
        "captures packed rows",
        "num_tokens",
    ),
    Seam(f"{KV_CACHE}.get_req_to_token_extra_context_len", "makes room behind the context limit"),
    Seam(f"{ALLOCATION}.get_alloc_reserve_per_decode", "makes room behind the context limit"),
    Seam(f"{GRAPH_BACKEND}.replay", "times graphs from where they begin"),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend.init_forward_metadata_out_graph",
        "plans packed rows for CUDA graphs",
        "forward_batch in_capture",
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend.init_cuda_graph_state",
        "allocates what graphs of packed rows read",
        "max_bs max_num_tokens kv_indices_buf",
    ),
    Seam(
        f"{FLASHINFER}.fast_prefill_plan",
        "plans packed rows without reading the device",
        "qo_indptr_host kv_indptr_host kv_lens_host max_q_len max_kv_len",
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend",
        "plans packed rows",
        fields="cuda_graph_custom_mask forward_metadata indices_updater_prefill max_context_len "
        "num_wrappers prefill_backend prefill_wrappers_verify req_to_token_pool "
        "supports_ragged_verify_graph workspace_buffer",
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend",
        "reads the slots of keys as they stand in the request table",
        fields="kv_index_translator",
        only_with=KV_INDEX_TRANSLATOR,
    ),
    Seam(
        f"{KV_INDEX_TRANSLATOR}.KVIndexTranslator",
        "reads the slots of keys as they stand in the request table",
        fields="reads_are_translated",
        otherwise=Seam(
            f"{KV_INDEX_TRANSLATOR}.KVIndexTranslator",
            "reads the slots of keys as they stand in the request table",
            fields="is_translating",
            only_with=KV_INDEX_TRANSLATOR,
        ),
        only_with=KV_INDEX_TRANSLATOR,
    ),
    Seam(
        f"{FLASHINFER}.FlashInferIndicesUpdaterPrefill",
        "plans packed rows",
        fields="num_qo_heads num_kv_heads head_dim q_data_type data_type",
    ),
    Seam(
        f"{FLASHINFER}.PrefillMetadata",
        "plans packed rows",
        "prefill_wrappers use_ragged extend_no_prefix",
    ),
    Seam(
        f"{FLASHINFER_MLA}.FlashInferMLAAttnBackend.init_forward_metadata_out_graph",
        "plans packed rows for CUDA graphs",
        "forward_batch in_capture",
    ),
    Seam(
        f"{FLASHINFER_MLA}.FlashInferMLAAttnBackend.init_forward_metadata",
        "plans packed rows",
        "forward_batch",
    ),
    Seam(
        f"{FLASHINFER_MLA}.FlashInferMLAAttnBackend.init_cuda_graph_state",
        "allocates what graphs of packed rows read",
        "max_bs max_num_tokens kv_indices_buf",
    ),
    Seam(
        f"{FLASHINFER_MLA}.FlashInferMLAAttnBackend",
        "plans packed rows",
        fields="forward_metadata indices_updater_prefill max_context_len prefill_wrapper_verify "
        "req_to_token_pool supports_ragged_verify_graph workspace_buffer",
    ),
    Seam(
        f"{FLASHINFER_MLA}.FlashInferMLAIndicesUpdaterPrefill",
        "plans packed rows",
        fields="num_local_heads kv_lora_rank qk_rope_head_dim scaling q_data_type data_type",
    ),
    Seam(
        f"{FLASHINFER_MLA}.PrefillMetadata",
        "plans packed rows",
        "prefill_wrapper use_ragged",
    ),
    Seam(
        f"{FLASHINFER_MLA}.fast_mla_decode_plan",
        "plans packed rows without reading the device",
        "qo_indptr_cpu kv_indptr_cpu kv_indices kv_len_arr_cpu num_heads head_dim_ckv head_dim_kpe "
        "page_size causal sm_scale q_data_type kv_data_type",
    ),
    Seam(
        FLASHINFER_LATENTS,
        "plans packed rows for CUDA graphs",
        "float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend",
        only_with="flashinfer",
    ),
    Seam(
        f"{FLASHINFER_LATENTS}.plan",
        "plans packed rows",
        "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size "
        "causal sm_scale q_data_type kv_data_type",
        only_with="flashinfer",
    ),
    Seam(
        f"{FLASHINFER}.DecodeMetadata",
        "tells draft rows their ancestors",
        fields="decode_wrappers",
    ),
    Seam(
        f"{FLASHINFER}.FlashInferMultiStepDraftBackend",
        "tells draft rows their ancestors",
        fields="attn_backends",
    ),
    Seam(
        f"{FLASHINFER}.FlashInferMultiStepDraftBackend.init_cuda_graph_state",
        SHARES_BUFFERS,
        "max_bs max_num_tokens",
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend._create_decode_wrappers",
        SHARES_BUFFERS,
        "bs num_tokens",
    ),
    Seam(
        f"{FLASHINFER}.FlashInferAttnBackend",
        SHARES_BUFFERS,
        fields="decode_cuda_graph_metadata",
    ),
    Seam(
        FLASHINFER_DECODE,
        SHARES_BUFFERS,
        fields="_int_workspace_buffer _pin_memory_int_workspace_buffer",
        only_with="flashinfer",
    ),
    Seam(
        f"{FLASH_ATTENTION}.FlashAttentionMultiStepBackend.init_cuda_graph_state",
        SHARES_BUFFERS,
        "max_bs max_num_tokens",
        on_gpu=True,
    ),
    Seam(
        f"{FLASH_ATTENTION}.FlashAttentionMultiStepBackend",
        SHARES_BUFFERS,
        fields="attn_backends",
        on_gpu=True,
    ),
    Seam(
        FLASHINFER_PREFILL,
        "plans packed rows for CUDA graphs",
        "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf "
        "paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf "
        "backend",
        fields="_int_workspace_buffer _pin_memory_int_workspace_buffer",
        only_with="flashinfer",
    ),
    Seam(
        FLASHINFER_PREFILL,
        "masks what tree nodes do not see",
        fields="_custom_mask_buf _mask_indptr_buf",
        only_with="flashinfer",
    ),
    Seam(
        f"{FLASHINFER_PREFILL}.begin_forward",
        "plans packed rows",
        "q_data_type kv_data_type non_blocking",
        only_with="flashinfer",
    ),
    Seam(
        FLASHINFER_DECODE,
        "tells draft rows their ancestors",
        fields="_paged_kv_indptr_buf _paged_kv_indices_buf",
        only_with="flashinfer",
    ),
    Seam("sglang.srt.runtime_context.get_parallel", "knows the tensor-parallel group"),
    Seam(
        "sglang.srt.runtime_context.SpawnRanks",
        "tells replicas apart",
        fields="dp_rank",
        otherwise=Seam(
            "sglang.srt.distributed.parallel_state_wrapper.ParallelState",
            "tells replicas apart",
            fields="dp_rank",
        ),
    ),
)
_LAYERS = "drafts as many layers as other ranks do"
_ROWS = "tells other ranks how many rows are verified"
#: Of attention that is data parallel (`data_parallel.py`); nothing else needs them.
DATA_PARALLEL_SEAMS: tuple[Seam, ...] = (
    Seam(f"{EAGLE_WORKER}.EagleDraftWorker._draft_forward_idle", _LAYERS, "forward_batch"),
    Seam(
        "sglang.srt.runtime_context.get_parallel",
        "knows the ranks that forward together",
    ),
    Seam("sglang.srt.utils.common.require_mlp_tp_gather", _ROWS),
    Seam("sglang.srt.utils.common.require_attn_tp_gather", _ROWS),
    Seam("sglang.srt.layers.moe.utils.get_moe_a2a_backend", _ROWS),
    Seam(f"{FORWARD_BATCH}.prepare_mlp_sync_batch", _ROWS, "model_runner"),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        _ROWS,
        fields="global_num_tokens global_num_tokens_for_logprob can_run_decode_cuda_graph "
        "can_run_dp_draft_cuda_graph",
    ),
    Seam(
        f"{EAGLE_INFO}.EagleVerifyInput",
        _ROWS,
        fields="num_tokens_per_req num_tokens_for_logprob_per_req",
    ),
    Seam(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        "forwards a row beside ranks that serve",
        fields="req_pool_indices seq_lens seq_lens_cpu seq_lens_sum orig_seq_lens "
        "multimodal_inputs forward_mode",
    ),
)
#: Through which newer SGLang tells its arguments: see hooks/hidden_keys.py.
TOLD_ARGUMENTS = (
    Seam(f"{SERVER_ARGS}.ServerArgs.resolved_dict", "hides keys", hook=True),
    Seam(
        "sglang.srt.utils.common.build_server_info",
        "hides keys",
        "server_args scheduler_info",
        hook=True,
    ),
)
#: What packed rows hold on to where adapters are served; where it is not, LoRA is refused.
ADAPTER_SEAMS = (
    Seam(
        "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility",
        "knows whether SGLang serves LoRA beside drafts",
    ),
    Seam(f"{LORA_MANAGER}.prepare_lora_batch", _ADAPTS, "forward_batch"),
    Seam(
        f"{LORA_MANAGER}.init_decode_cuda_graph_batch_info",
        _ADAPTS,
        "max_bs_in_cuda_graph num_tokens_per_req",
    ),
    Seam(LORA_MANAGER, _ADAPTS, fields="lora_backend"),
    Seam(
        "sglang.srt.lora.backend.base_backend.BaseLoRABackend",
        _ADAPTS,
        fields="is_moe_lora",
    ),
    Seam(MODEL_RUNNER, _ADAPTS, fields="lora_manager"),
    Seam(FORWARD_BATCH, _ADAPTS, fields="forward_mode batch_size lora_ids input_ids spec_info"),
    Seam(
        f"{DECODE_GRAPHS}.DecodeCudaGraphRunner",
        _ADAPTS,
        fields="ragged_verify_mode capture_num_tokens model_runner",
    ),
    Seam(f"{DECODE_GRAPHS}.DecodeCudaGraphRunner.maybe_init_pdmux", _ADAPTS),
)
_CHOICES = "add_{}deterministic_attention_backend_choices"
#: What makes SGLang's CPU engine run without its AMX kernels (`cpu/engine.py`); nothing else
#: needs them.
CPU_SEAMS: tuple[Seam, ...] = (
    Seam("sglang.srt.utils.common.cpu_has_amx_support", "knows which kernels are missing"),
    resolution_seam(ATTENTION_STEP, "keeps the attention backend of the CPU"),
    Seam(
        f"{ATTENTION_HOOK}._attention_backend_platform_fallbacks",
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
        fields="_create_intel_amx_decode_backend _create_intel_amx_prefill_backend _create_backend "
        "draft_model_runner topk speculative_num_steps",
    ),
    Seam(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory",
        "drafts chains in a server of trees",
        "draft_model_runner topk speculative_num_steps",
    ),
    Seam(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
        "drafts chains in a server of trees",
    ),
    Seam(
        "sglang.srt.speculative.base_spec_worker.EagleDraftWorkerBase",
        "drafts chains in a server of trees",
        fields="_rebuild_topk1_chain_buffers _topk1_parents_prealloc",
    ),
    Seam(
        f"{EAGLE_INFO}.EagleDraftInput",
        "drafts chains in a server of trees",
        fields="topk_p topk_index",
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
    Seam("torch.cuda.synchronize", "runs models on a CPU that wait for a GPU"),
    Seam(
        f"{MLA_MODELS}.AttentionBackendRegistry.register",
        "attends to latent keys on a CPU",
        only_with=MLA_MODELS,
    ),
    Seam(
        "sglang.srt.distributed.device_communicators.pynccl.NCCLLibrary",
        "leaves NCCL out on a CPU",
    ),
    Seam(INIT_DISAGGREGATION, "sends keys from a CPU to another server"),
    *(Seam(target, "adapts models without pinned memory on a CPU") for target in PINS_ADAPTERS),
    # Its module imports prometheus_client, which must not be before SGLang says where values go.
    Seam(
        f"{MOONCAKE}.MooncakeKVSender",
        "sends keys from a CPU to another server",
        fields="supports_host_tensor_indices",
        otherwise=Seam(
            f"{MOONCAKE}.MooncakeKVSender",
            "sends keys from a CPU to another server",
            if_imported=True,
        ),
        if_imported=True,
    ),
    *(
        Seam(f"sglang.srt.mem_cache.allocation.{name}", "goes on in pages on a CPU")
        for name in ("get_last_loc_triton", "get_last_loc_torch")
    ),
    *(
        Seam(f"{EAGLE_UTILS}.{name}", "verifies with samples on a CPU")
        for name in ("eagle_sample", "verify_tree_greedy_func")
    ),
    Seam(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
        "brings an attention backend for the CPU",
        fields="init_forward_metadata forward_extend forward_decode support_triton",
    ),
    Seam(
        "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
        "reads sliding windows on a CPU",
        fields="swa_layer_nums layers_mapping translate_loc_from_full_to_swa",
    ),
)

#: Whatever is asked of an SGLang, by some server.
EVERY_SEAM = (*SEAMS, *CPU_SEAMS, *ADAPTER_SEAMS, *DATA_PARALLEL_SEAMS)


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

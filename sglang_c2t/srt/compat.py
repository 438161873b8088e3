"""The seams: every place in SGLang we hold on to, probed by feature, never by version.

SGLang's plugin loader logs and swallows exceptions, so a seam that moved would leave a
server that looks right and runs without C2T. Therefore each seam is listed here with
what it is for, and ``--c2t`` refuses to start when one is missing.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_c2t.config import ConfigError

EAGLE_WORKER = "sglang.srt.speculative.eagle_worker_v2"
STANDALONE_WORKER = "sglang.srt.speculative.standalone_worker_v2"
EAGLE_COMMON = "sglang.srt.speculative.eagle_worker_common"

# Hook targets, named once: plugin.py registers on them, the probes below look them up.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
SPEC_METRICS = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"
)
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
MODEL_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
#: Attention backends that may read packed rows, by SGLang's name; ragged_verify.py looks at
#: the backend itself once it exists.
RAGGED_BACKENDS = ("intel_amx",)

#: Attention backends that read our tree masks, by SGLang's name; the CPU one is ours, see
#: cpu_engine.py.
TREE_BACKENDS = ("flashinfer", "intel_amx")

RESOLUTION_STEP = "handle_speculative_decoding"


class SeamError(ConfigError):
    """The installed SGLang lacks something C2T attaches to."""


@dataclass(frozen=True)
class Seam:
    """One symbol of SGLang that we call, override or wrap.

    ``parameters`` are names the callable must accept; ``fields`` are names the
    dataclass must have. ``hook`` marks targets of SGLang's own hook registry.
    """

    target: str
    purpose: str
    parameters: Sequence[str] = ()
    fields: Sequence[str] = ()
    hook: bool = False

    def defect(self) -> str | None:
        """What is wrong with the seam in this SGLang; ``None`` when it fits."""
        try:
            found = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            return f"not found ({error})"
        missing = [p for p in self.parameters if p not in _parameters(found)]
        if missing:
            return f"lacks the parameters {missing}"
        missing = [f for f in self.fields if f not in _field_names(found)]
        if missing:
            return f"lacks the fields {missing}"
        return None


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def _field_names(cls: type) -> set[str]:
    """Dataclass fields and class-level defaults."""
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return fields | {name for name in dir(cls) if not name.startswith("__")}


SEAMS: tuple[Seam, ...] = (
    Seam(ADD_CLI_ARGS, "adds the --c2t flags", ["parser"], hook=True),
    Seam(FROM_CLI_ARGS, "reads the --c2t flags", ["args"], hook=True),
    Seam(CREATE_WORKER, "swaps in the C2T worker", ["server_args"], hook=True),
    Seam(SPEC_METRICS, "corrects spec_accept_rate", ["meta_info", "recv_obj", "i"], hook=True),
    Seam(INTERNAL_STATE, "reports counters in /server_info", ["recv_req"], hook=True),
    Seam(
        "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
        "refuses unsupported combinations before a model loads",
        ["name"],
    ),
    Seam("sglang.srt.arg_groups.overrides.resolving_view", "reads resolved server arguments"),
    Seam(f"{EAGLE_WORKER}.EAGLEWorkerV2", "worker of EAGLE, EAGLE3 and NEXTN"),
    Seam(f"{EAGLE_WORKER}.EAGLEWorkerV2.verify", "cuts drafts before verification", ["batch"]),
    Seam(
        f"{EAGLE_WORKER}.EAGLEWorkerV2.init_attention_backends",
        "learns which verification the attention backend supports",
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
    Seam(f"{EAGLE_COMMON}.run_eagle_verify", "calls eagle_prepare_for_verify by its global name"),
    Seam(
        "sglang.srt.speculative.eagle_info.EagleVerifyInput",
        "is cut and packed",
        fields=[
            "draft_token",
            "positions",
            "retrieve_next_token",
            "draft_token_num",
            "custom_mask",
            "prepared_out_cache_loc",
            "kv_loc_plan",
            "ragged_verify_layout",
        ],
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
        "sglang.srt.speculative.eagle_info.EagleVerifyInput.generate_attn_arg_prefill",
        "tells FlashInfer the rows and the mask of each tree",
        ["req_pool_indices", "paged_kernel_lens", "paged_kernel_lens_sum", "translator", "plan"],
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
        "sglang.srt.speculative.ragged_verify.RaggedVerifyLayout.from_verify_lens_device",
        "tells attention the rows of each request",
        ["verify_lens", "graph_num_tokens"],
    ),
    Seam(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "carries verify lengths to meta_info and labels to recordings",
        fields=["cap_lens", "accept_lens", "logits_output", "speculative_output_stride"],
    ),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "measures drafted tokens",
        fields=["next_token_logits", "hidden_states"],
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        "knows the requests of a step",
        fields=["reqs", "seq_lens", "req_pool_indices"],
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req",
        "names requests and prompts in recordings",
        ["rid", "origin_input_ids", "sampling_params"],
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "unpacks the target's output",
        ["forward_batch"],
    ),
    Seam("sglang.srt.runtime_context.get_parallel", "knows the tensor-parallel group"),
)


def broken_seams() -> list[str]:
    """One sentence per seam that this SGLang does not offer; empty when all fit."""
    return [
        f"SGLang {sglang_version()} does not offer the seam {seam.target}: {defect}; "
        f"C2T needs it because it {seam.purpose}"
        for seam in SEAMS
        if (defect := seam.defect()) is not None
    ]


def missing_hooks() -> list[str]:
    """One sentence per hook that SGLang's registry failed to apply; its errors are only logged."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [
        f"SGLang {sglang_version()} did not apply the hook on {seam.target}; "
        f"C2T needs it because it {seam.purpose}"
        for seam in SEAMS
        if seam.hook and seam.target not in HookRegistry._patched
    ]


def require_seams() -> None:
    """Raise :class:`SeamError` naming every broken seam."""
    defects = broken_seams()
    if defects:
        raise SeamError("; ".join(defects))


def on_resolution(hook: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Run ``hook(server_args, previous)`` around SGLang's speculative argument checks.

    Silent when the registry is gone: :func:`require_seams` then names it.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        return
    register_resolution_hook(RESOLUTION_STEP)(hook)


def resolved(server_args: Any) -> Any:
    """A view of the arguments with SGLang's own decisions applied."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


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


def decode_graphs_enabled(cfg: Any) -> bool:
    """Whether resolved arguments ask for CUDA graphs in decode."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return bool(cfg.cuda_graph_config.decode.backend != Backend.DISABLED)


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


def is_flashinfer(backend: Any) -> bool:
    """Whether an attention backend is FlashInfer's, which takes the ragged arguments and the
    mask of a verify input as they are. By name: importing it needs FlashInfer.
    """
    return type(backend).__name__ == "FlashInferAttnBackend"


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
    original = getattr(module, name)
    if getattr(original, "c2t_wrapper", None) is wrapper:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.c2t_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(module, name, wrapped)


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)

"""The entry point SGLang calls in each of its processes; reads as a list of what we touch.

``register`` must be cheap and must not import models or kernels: it also runs in the
launcher, the tokenizer and the detokenizer. SGLang swallows exceptions raised here,
hence ``SystemExit`` where silence would mean a server without C2T.
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Install what this process needs (entry-point group ``sglang.srt.plugins``)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_c2t.config import ConfigError, active
    from sglang_c2t.srt import attach, seams
    from sglang_c2t.srt.hooks import (
        args,
        control,
        endpoints,
        hidden_keys,
        refusals,
        reporting,
        request_fields,
        requests,
        step_metrics,
        worker_factory,
    )

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from sglang_c2t.srt.cpu import engine as cpu_engine

        cpu_engine.install()

    HookRegistry.register(seams.ADD_CLI_ARGS, args.add_arguments, HookType.AFTER)
    HookRegistry.register(seams.FROM_CLI_ARGS, args.read_arguments, HookType.AROUND)
    HookRegistry.register(seams.CREATE_WORKER, worker_factory.create_worker, HookType.AROUND)
    HookRegistry.register(seams.SPEC_METRICS, reporting.correct_accept_rate, HookType.AFTER)
    HookRegistry.register(seams.SPEC_METRICS, request_fields.drop_logprobs, HookType.AFTER)
    HookRegistry.register(seams.UPDATE_FINISH, request_fields.count_reasoning, HookType.AFTER)
    HookRegistry.register(seams.INTERNAL_STATE, reporting.add_counters, HookType.AFTER)
    HookRegistry.register(seams.SET_INTERNAL_STATE, control.set_internal_state, HookType.AROUND)
    HookRegistry.register(seams.ASK_INTERNAL_STATE, control.refuse_our_names, HookType.AROUND)
    HookRegistry.register(seams.TOKENIZER_MANAGER, control.add_routes, HookType.AFTER)
    HookRegistry.register(seams.UPDATE_WEIGHTS, endpoints.update_target, HookType.AROUND)
    for seam in seams.WEIGHT_REQUESTS:
        if seam.defect() is None:
            HookRegistry.register(seam.target, endpoints.survive_update, HookType.AROUND)
    HookRegistry.register(seams.CONFIGURE_LOGGING, endpoints.check_logging, HookType.AROUND)
    for target in seams.RECORD_EXPERTS:
        HookRegistry.register(target, endpoints.record_experts, HookType.AROUND)
    for target in seams.WAITS:
        HookRegistry.register(target, endpoints.wait_for_another, HookType.AROUND)
    if seams.can_hide_keys():
        for seam, hook in zip(seams.TOLD_ARGUMENTS, hidden_keys.HOOKS, strict=True):
            HookRegistry.register(seam.target, hook, HookType.AFTER)
    HookRegistry.register(
        seams.VERIFY_SAMPLING_PARAMS, requests.check_sampling_params, HookType.AFTER
    )
    HookRegistry.register(seams.VALIDATE_REQUEST, requests.check_request, HookType.AROUND)
    HookRegistry.register(seams.CREATE_MESSAGE, requests.check_message, HookType.AROUND)
    HookRegistry.register(seams.NORMALIZE_REQUEST, requests.check_batch, HookType.AROUND)
    HookRegistry.register(seams.RESOLVE_RESULT, step_metrics.count_step, HookType.AROUND)
    HookRegistry.register(seams.LOG_STATS, step_metrics.correct_gauge, HookType.BEFORE)
    if reporting.counting():
        HookRegistry.register(seams.MODEL_FORWARD, reporting.count_forward, HookType.AROUND)
    attach.on_resolution(seams.SPECULATIVE_STEP, refusals.check_resolved_arguments)

    try:
        if active() is not None:  # switched on by the environment, no flag was parsed
            seams.require_seams()
    except ConfigError as error:
        sys.exit(f"sglang-c2t: error: {error}")

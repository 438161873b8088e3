"""The entry point that SGLang calls in each of its processes: the list of all that C2T touches.

``register`` must be cheap and must not import models or kernels: it also runs in the launcher, the
tokenizer and the detokenizer. SGLang ignores exceptions raised here, so it raises ``SystemExit``
where silence would mean a server without C2T.
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Install the hooks of this process (entry-point group ``sglang.srt.plugins``)."""
    from sglang_c2t.config import ConfigError, active
    from sglang_c2t.srt import attach, seams
    from sglang_c2t.srt.hooks import (
        args,
        control,
        endpoints,
        hidden_keys,
        reporting,
        request_fields,
        requests,
        resolution,
        step_metrics,
        worker_factory,
    )

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from sglang_c2t.srt.cpu import engine as cpu_engine

        cpu_engine.install()

    for label, function, kind in (
        ("add_cli_args", args.add_arguments, "after"),
        ("from_cli_args", args.read_arguments, "around"),
        ("create_worker", worker_factory.create_worker, "around"),
        ("spec_metrics", reporting.correct_accept_rate, "after"),
        ("spec_metrics", request_fields.drop_logprobs, "after"),
        ("update_finish", request_fields.count_reasoning, "after"),
        ("internal_state", reporting.add_counters, "after"),
        ("set_internal_state", control.set_internal_state, "around"),
        ("ask_internal_state", control.refuse_our_names, "around"),
        ("tokenizer_manager", control.add_routes, "after"),
        ("update_weights", endpoints.update_target, "around"),
        ("survive_update", endpoints.survive_update, "around"),
        ("configure_logging", endpoints.check_logging, "around"),
        ("record_experts", endpoints.record_experts, "around"),
        ("wait_for_another", endpoints.wait_for_another, "around"),
        ("verify_sampling_params", requests.check_sampling_params, "after"),
        ("validate_request", requests.check_request, "around"),
        ("create_message", requests.check_message, "around"),
        ("normalize_request", requests.check_batch, "around"),
        ("resolve_result", step_metrics.count_step, "around"),
        ("log_stats", step_metrics.correct_gauge, "before"),
    ):
        attach.hook(label, function, kind)
    if seams.can_hide_keys():
        attach.hook("resolved_dict", hidden_keys.hide_fields, "after")
        attach.hook("build_server_info", hidden_keys.hide_command, "after")
    if reporting.counting():
        attach.hook("model_forward", reporting.count_forward, "around")
    attach.on_resolution("handle_speculative_decoding", resolution.check_resolved_arguments)

    try:
        if active() is not None:  # set by the environment, without a flag
            seams.require_seams()
    except ConfigError as error:
        sys.exit(f"sglang-c2t: error: {error}")

"""SGLang's own endpoints that end a server with drafts, or any server: they say why instead.

With ``--admin-api-key`` they ask for it, without keys anybody may call them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_c2t.checks import is_whole, require, told
from sglang_c2t.config import ConfigError, active
from sglang_c2t.srt import attach, compat

logger = logging.getLogger(__name__)

#: What SGLang's request logger knows; any other value fails in every request from then on.
LOG_LEVELS, LOG_FORMATS = (0, 1, 2, 3), ("text", "json")


def update_target(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND hook on ``SchedulerWeightUpdaterManager.update_weights_from_disk``.

    SGLang loads the same checkpoint into target and draft, which fails for a draft of its own,
    and then the weights it was to roll back to from the new path, which ends the server. Here the
    target alone is updated, unless the draft is part of its checkpoint, and rolled back from the
    path that it was loaded from.
    """
    if active() is None:
        return original(manager, recv_req)
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    updater = manager.tp_worker.model_runner.weight_updater
    before = updater.model_config.model_path
    draft = None if compat.has_own_draft(manager.tp_worker.server_args) else manager.draft_worker
    try:
        with attach.swapped(manager, "draft_worker", draft):
            output = original(manager, recv_req)
    except Exception as error:
        logger.exception("C2T: /update_weights_from_disk failed")
        why = f"the weights stay as they are: {told(error)}"
        output = UpdateWeightFromDiskReqOutput(success=False, message=why)
        updated, message = updater.update_weights_from_disk(before, recv_req.load_format)
        if not updated:  # they are neither the old nor the new ones
            raise RuntimeError(message) from error
    if not output.success:
        attach.write(updater.model_config, model_path=before)
    return output


def survive_update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND hook on the handlers of ``seams.WEIGHT_REQUESTS`` in the scheduler: what cannot be
    read or loaded is answered, as a load that SGLang itself finds wrong is.
    """
    try:
        return original(manager, recv_req)
    except Exception as error:
        if active() is None:
            raise
        logger.exception("C2T: %s failed", type(recv_req).__name__)
        from sglang.srt.managers import io_struct

        output = getattr(io_struct, type(recv_req).__name__.replace("Input", "Output"))
        return output(success=False, message=told(error))


def check_logging(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """AROUND hook on ``TokenizerManager.configure_logging``."""
    if active() is not None:
        try:
            _require_logging(obj)
        except ConfigError as error:
            _refuse(str(error))
    return original(manager, obj)


def _require_logging(obj: Any) -> None:
    for name, allowed in (("log_requests_level", LOG_LEVELS), ("log_requests_format", LOG_FORMATS)):
        value = getattr(obj, name)
        require(value is None or value in allowed, name, f"one of {allowed}", value)
    threshold = obj.dump_requests_threshold
    fits = threshold is None or is_whole(threshold, 1)
    require(fits, "dump_requests_threshold", "a whole number >= 1", threshold)
    level = obj.log_level
    known = level is None or level.upper() in logging.getLevelNamesMapping()
    require(known, "log_level", "one of logging's", level)


async def record_experts(original: Callable[..., Awaitable[Any]], manager: Any) -> Any:
    """AROUND hook on ``TokenizerManager.start_expert_distribution_record``, and its end and dump:
    a scheduler without a recorder ends.
    """
    mode = compat.argument(manager.server_args, "expert_distribution_recorder_mode")
    if active() is not None and mode is None:
        _refuse("experts are recorded with --expert-distribution-recorder-mode only")
    return await original(manager)


async def wait_for_another(
    original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, request: Any = None
) -> Any:
    """AROUND hook on what has the scheduler wait until another machine answers, or for ever: over
    HTTP that is the admin's to ask for.
    """
    over_http = active() is not None and request is not None
    if over_http and not compat.argument(manager.server_args, "admin_api_key"):
        _refuse("this may keep the server waiting for another machine: set --admin-api-key")
    return await original(manager, obj, request)


def _refuse(sentence: str) -> None:
    from fastapi import HTTPException

    raise HTTPException(400, sentence)

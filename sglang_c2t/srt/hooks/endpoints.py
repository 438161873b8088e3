"""Guards for SGLang endpoints that would end a server: they return an error instead. With
``--admin-api-key`` these endpoints require it; without keys every client may call them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_c2t.checks import format_error, is_whole, require
from sglang_c2t.config import ConfigError, active
from sglang_c2t.srt import attach, compat

logger = logging.getLogger(__name__)

#: Values that SGLang's request logger supports; any other makes every later request fail.
LOG_LEVELS, LOG_FORMATS = (0, 1, 2, 3), ("text", "json")


def update_target(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND hook on ``SchedulerWeightUpdaterManager.update_weights_from_disk``.

    SGLang loads the same checkpoint into target and draft, which fails for a separate draft. It
    then rolls back from the new path, which ends the server. This hook updates the target alone,
    unless its checkpoint includes the draft, and rolls back from the path that it was loaded from.
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
        why = f"the weights stay as they are: {format_error(error)}"
        output = UpdateWeightFromDiskReqOutput(success=False, message=why)
        updated, message = updater.update_weights_from_disk(before, recv_req.load_format)
        if not updated:  # the weights are now neither the old nor the new ones
            raise RuntimeError(message) from error
    if not output.success:
        attach.write(updater.model_config, model_path=before)
    return output


def survive_update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND hook on the scheduler's handlers of ``seams.WEIGHT_REQUESTS``: answers a failed load.
    It answers as SGLang does for loads that it rejects itself.
    """
    try:
        return original(manager, recv_req)
    except Exception as error:
        if active() is None:
            raise
        logger.exception("C2T: %s failed", type(recv_req).__name__)
        from sglang.srt.managers import io_struct

        output = getattr(io_struct, type(recv_req).__name__.replace("Input", "Output"))
        return output(success=False, message=format_error(error))


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
    """AROUND hook on ``TokenizerManager.start_expert_distribution_record``, its end and its dump. A
    scheduler without a recorder would end.
    """
    mode = compat.argument(manager.server_args, "expert_distribution_recorder_mode")
    if active() is not None and mode is None:
        _refuse("experts are recorded with --expert-distribution-recorder-mode only")
    return await original(manager)


async def wait_for_another(
    original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, request: Any = None
) -> Any:
    """AROUND hook on calls that make the scheduler wait for another machine: over HTTP they need an
    admin key.
    """
    over_http = active() is not None and request is not None
    if over_http and not compat.argument(manager.server_args, "admin_api_key"):
        _refuse("this may keep the server waiting for another machine: set --admin-api-key")
    return await original(manager, obj, request)


def _refuse(sentence: str) -> None:
    from fastapi import HTTPException

    raise HTTPException(400, sentence)

"""``/c2t``: the policy and the threshold of a running server.

The HTTP process checks what is asked for, then every scheduler takes it between two steps.
Requests in flight go on: what changes is how much of their drafts is verified, never what
they are answered.

    GET /c2t
    POST /c2t  {"policy": "c2t-plus", "beta": 0.4}

Settings not named stay, but a new policy brings its own threshold, classifier and options.
POST is authenticated as SGLang's own endpoints that change a server; GET as those that do not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sglang_c2t.config import C2TConfig, ConfigError, active, publish
from sglang_c2t.policies import policy_for
from sglang_c2t.srt.reporting import CONTROL

logger = logging.getLogger(__name__)

#: What can change while a server runs.
CHANGEABLE = ("policy", "beta", "classifier", "policy_options")

#: SGLang's message to its schedulers carries numbers by name; ours travel in a name.
_PREFIX = "c2t "


def changed(config: C2TConfig, values: object) -> C2TConfig:
    """``config`` with the ``values`` of a POST; ConfigError where they make no sense."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"the body must be a JSON object, got {type(values).__name__}")
    for name in values:
        if name not in CHANGEABLE:
            raise ConfigError(
                f"c2t {name} cannot change while the server runs; what can: {', '.join(CHANGEABLE)}"
            )
    if not values:
        raise ConfigError(f"nothing to change; give one of {', '.join(CHANGEABLE)}")
    if "policy" in values:
        defaults = C2TConfig()
        config = dataclasses.replace(
            config, **{name: getattr(defaults, name) for name in CHANGEABLE}
        )
    return dataclasses.replace(config, **values)


def settings(config: C2TConfig) -> dict[str, Any]:
    """What can change, by name."""
    values = json.loads(config.to_json())
    return {name: values[name] for name in CHANGEABLE}


# -- in the scheduler -----------------------------------------------------------------------


def set_internal_state(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND hook on ``Scheduler.set_internal_state``: takes what :func:`_post` sends."""
    texts = [name for name in recv_req.server_args if name.startswith(_PREFIX)]
    if not texts:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    try:
        config = C2TConfig.from_json(texts[0].removeprefix(_PREFIX), source="POST /c2t")
        scheduler.draft_worker.switch(config)
    except ConfigError as error:
        CONTROL.refusal = str(error)
        logger.warning("C2T: settings stay as they are: %s", error)
        return SetInternalStateReqOutput(updated=False)
    publish(config)
    CONTROL.switches += 1
    CONTROL.refusal = None
    logger.info("C2T: from now on %s", settings(config))
    return SetInternalStateReqOutput(updated=True)


# -- in the HTTP process --------------------------------------------------------------------


def add_routes(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook on ``TokenizerManager.__init__``, where there is an HTTP server."""
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if active() is None or http_server is None:
        return
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    one_at_a_time = asyncio.Lock()

    async def read() -> JSONResponse:
        return JSONResponse(_told(await _states(manager)))

    async def change(request: Request) -> JSONResponse:
        async with one_at_a_time:
            try:
                return JSONResponse(await _post(manager, await request.body()))
            except ConfigError as error:
                told = {"message": str(error), "type": "BadRequest", "code": 400}
                return JSONResponse({"error": told}, status_code=400)

    auth_level(AuthLevel.ADMIN_OPTIONAL)(change)
    # A string annotation would be looked up in this module, where fastapi is not imported.
    change.__annotations__["request"] = Request
    for method, endpoint in {"GET": read, "POST": change}.items():
        http_server.app.add_api_route("/c2t", endpoint, methods=[method], response_model=None)


async def _post(manager: Any, body: bytes) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    try:
        values = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the body is not valid JSON: {error}") from error
    in_force = C2TConfig.from_json((await _states(manager))[0]["config"], source="/c2t")
    config = changed(in_force, values)
    # Reads files: not on the loop that serves all requests.
    await asyncio.to_thread(policy_for, config, manager.server_args.speculative_eagle_topk)
    taken = await manager.set_internal_state(
        SetInternalStateReq(server_args={_PREFIX + config.to_json(): 1})
    )
    states = await _states(manager)
    if not all(taken):
        reasons = {state["control"]["refusal"] for state in states} - {None}
        raise ConfigError("; ".join(sorted(reasons)) or "a scheduler refused the settings")
    return _told(states)


async def _states(manager: Any) -> list[dict[str, Any]]:
    """What each data-parallel scheduler reports, see :mod:`sglang_c2t.srt.reporting`."""
    return [state["c2t"] for state in await manager.get_internal_state()]


def _told(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings in force, and how often each scheduler has changed them."""
    config = C2TConfig.from_json(states[0]["config"], source="/c2t")
    return {**settings(config), "switches": [state["control"]["switches"] for state in states]}

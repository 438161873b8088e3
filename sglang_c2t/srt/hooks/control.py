"""``/c2t``: reads and changes the policy and the threshold of a running server.

The HTTP process checks a change. Every scheduler checks it again and applies it between two steps.
Running requests continue: the change affects how many drafts are verified, never the output.

    GET /c2t
    POST /c2t  {"policy": "c2t-plus", "beta": 0.4}
    POST /c2t  {"forget": true}

Settings not named stay, but a new policy brings its own threshold, classifier and options.
:mod:`~sglang_c2t.srt.hooks.http_guard` authorises POST. GET has the authentication of SGLang's
endpoints that change nothing.

The server imports no name and opens no path that a client sends. It accepts names of the menu, of
the shipped classifiers, of one directory given at start, and of the server's own flags.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from operator import itemgetter
from pathlib import Path
from typing import Any

from sglang_c2t.checks import parse_json, require, shown
from sglang_c2t.classifier.checkpoint import load_classifier, shipped_names
from sglang_c2t.config import DEFAULT, C2TConfig, ConfigError, active, publish
from sglang_c2t.hints import did_you_mean
from sglang_c2t.policies import policy_for, policy_names
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt import attach, compat, seams
from sglang_c2t.srt.hooks.http_guard import RefusedError, authorise, read_body, who_may
from sglang_c2t.srt.hooks.reporting import CONTROL
from sglang_c2t.srt.hooks.requests import check_body

logger = logging.getLogger(__name__)

#: Settings that can change while a server runs.
CHANGEABLE = ("policy", "beta", "classifier", "policy_options", "tpot_ms")

#: Key that makes the planner forget what it has learnt.
FORGET = "forget"

#: SGLang's message to its schedulers maps names to numbers; ours is encoded in a name.
_PREFIX = "c2t "

#: A file in the classifier directory: no separators, no leading dot.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}\.safetensors")


# -- allowed changes --------------------------------------------------------------------------


def changed(in_force: C2TConfig, values: object, start: C2TConfig) -> C2TConfig:
    """Return ``in_force`` with the ``values`` of a POST to a server that started with ``start``.
    Raises :class:`ConfigError` for invalid values and for names that no client may choose. It reads
    no files; :func:`approved` does.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"the body must be a JSON object, got {type(values).__name__}")
    values = dict(values)
    forget = values.pop(FORGET, None)
    require(forget is None or forget is True, f"c2t {FORGET}", "true", forget)
    for name in values:
        if name not in CHANGEABLE:
            raise ConfigError(
                f"c2t {shown(name)} cannot change while the server runs; what can: "
                f"{', '.join(CHANGEABLE)}{did_you_mean(str(name), CHANGEABLE)}"
            )
    if not values and forget is None:
        raise ConfigError(f"nothing to change; give one of {', '.join(CHANGEABLE)}")
    if "policy" in values:
        defaults = start if _is_own(values["policy"], start) else C2TConfig()
        in_force = dataclasses.replace(
            in_force, **{name: getattr(defaults, name) for name in CHANGEABLE}
        )
    if "classifier" in values:
        values["classifier"] = _classifier(values["classifier"], start)
    config = dataclasses.replace(in_force, **values)
    if _is_own(config.policy, start):
        if config.policy_options != start.policy_options:
            raise ConfigError(
                f"policy {config.policy} keeps the policy_options that the server was started with"
            )
    elif config.policy not in policy_names():
        raise ConfigError(
            f"unknown c2t policy {shown(config.policy)}; known here: {', '.join(policy_names())}"
            f"{did_you_mean(config.policy, policy_names())}"
        )
    return config


def approved(config: C2TConfig, start: C2TConfig, shape: TreeShape, pair: str | None = None) -> Any:
    """Return the policy of a config from :func:`changed`, for a ``pair`` as in :func:`policy_for`.
    The sentences of its :class:`ConfigError` may be sent to clients. They name files, but show
    neither their folders nor their content.
    """
    name = shown_classifier(config)
    path = Path(config.classifier)
    if config.classifier != start.classifier and path.is_absolute():
        _require_inside(path, start)
    try:
        if config.classifier != "default":
            load_classifier(config.classifier)
    except ConfigError as error:
        logger.warning("C2T: POST /c2t: %s", error)
        raise ConfigError(
            f"classifier {shown(name)} cannot be used: the server's log says why"
        ) from error
    try:
        return policy_for(config, shape, pair)
    except ConfigError as error:
        raise ConfigError(str(error).replace(config.classifier, name)) from error


def settings(config: C2TConfig) -> dict[str, Any]:
    """Return the changeable settings by name, without paths, for clients."""
    values = json.loads(config.to_json())
    told = {name: values[name] for name in CHANGEABLE}
    told["classifier"] = shown_classifier(config)
    if config.policy not in policy_names():  # a user's own policy, with any options
        told["policy_options"] = dict.fromkeys(told["policy_options"], "as at start")
    return told


def shown_classifier(config: C2TConfig) -> str:
    """Return the classifier's name; of a file its name without the directory."""
    known = config.classifier in shipped_names()
    return config.classifier if known else Path(config.classifier).name


def _is_own(policy: object, start: C2TConfig) -> bool:
    """Whether ``policy`` is the one that the server started with and not on the menu."""
    return policy == start.policy and policy not in (DEFAULT, *policy_names())


def _classifier(value: object, start: C2TConfig) -> str:
    """Return the classifier for a client's ``value``: a known name or a file of the directory."""
    if value in (start.classifier, shown_classifier(start)):
        return start.classifier
    known = ["default", *shipped_names()]
    if value in known:
        return str(value)
    if start.classifier_dir is None:
        raise ConfigError(
            f"classifier must be one of {', '.join(known)}: this server was started without "
            f"--c2t-classifier-dir, got {shown(value)}"
        )
    files = _files(Path(start.classifier_dir))
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value) or value not in files:
        raise ConfigError(
            f"classifier must be one of {', '.join([*known, *files])}, got {shown(value)}"
        )
    return str(Path(start.classifier_dir).absolute() / value)


def _files(folder: Path) -> list[str]:
    """Return names of the classifiers in a directory, at most a hundred."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        logger.warning("C2T: cannot list the classifier directory: %s", error)
        return []
    return [name for name in names if _FILE_NAME.fullmatch(name)][:100]


def _require_inside(path: Path, start: C2TConfig) -> None:
    """Refuse links that lead out of the classifier directory, for the weights and the card."""
    folder = Path(start.classifier_dir or "").resolve()
    for part in (path, path.with_suffix(".json")):
        if part.resolve().parent != folder:
            raise ConfigError(f"classifier {shown(path.name)} is no file of its directory")


# -- in the scheduler -----------------------------------------------------------------------


def set_internal_state(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND hook on ``Scheduler.set_internal_state``: applies the message of :func:`_post`. It
    repeats the checks of the HTTP process, because the message holds a client's values. Any error
    is a refusal.
    """
    names = list(recv_req.server_args)
    if not any(name.startswith(_PREFIX) for name in names):
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    try:
        if len(names) > 1:
            raise ConfigError("one change at a time")
        values = parse_json(names[0].removeprefix(_PREFIX), source="POST /c2t")
        config = scheduler.draft_worker.change(values)
    except ConfigError as error:
        CONTROL.refusal = str(error)
        logger.warning("C2T: settings stay as they are: %s", error)
        return SetInternalStateReqOutput(updated=False)
    except Exception:
        CONTROL.refusal = "the settings cannot be served: the server's log says why"
        logger.exception("C2T: settings stay as they are")
        return SetInternalStateReqOutput(updated=False)
    publish(config)
    CONTROL.switches += 1
    CONTROL.refusal = None
    logger.info("C2T: from now on %s", settings(config))
    return SetInternalStateReqOutput(updated=True)


# -- in the HTTP process --------------------------------------------------------------------

_posting: ContextVar[bool] = ContextVar("posting", default=False)


async def refuse_our_names(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """AROUND hook on ``TokenizerManager.set_internal_state``, which SGLang's own endpoint calls.
    Only :func:`_post` may send names with our prefix.
    """
    ours = any(name.startswith(_PREFIX.strip()) for name in obj.server_args)
    if ours and active() is not None and not _posting.get():
        from fastapi import HTTPException

        raise HTTPException(400, "the settings of C2T change over POST /c2t only")
    return await original(manager, obj)


def add_routes(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook on ``TokenizerManager.__init__`` with an HTTP server: adds our endpoint and the
    wrappers of this process.
    """
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    start = active()
    if start is None or http_server is None:
        return
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    attach.wrap_global("fastapi.routing", "solve_dependencies", check_body)
    one_at_a_time = asyncio.Lock()
    keys = _keys(manager.server_args)
    may = who_may(admin_api_key=keys["admin_api_key"], loopback=start.loopback_control)
    changed_by = {"changed_by": may}

    async def read() -> JSONResponse:
        return JSONResponse(_told(await _states(manager)) | changed_by)

    async def change(request: Request) -> JSONResponse:
        try:
            authorise(request, **keys, loopback=start.loopback_control)
            body = await read_body(request)  # before the lock: a slow client waits alone
            async with one_at_a_time:
                return JSONResponse(await _post(manager, body, start) | changed_by)
        except RefusedError as refused:
            return _error(refused.status, refused.sentence)
        except ConfigError as error:
            return _error(400, str(error))

    def _error(status: int, sentence: str) -> JSONResponse:
        told = {"message": sentence, "type": "BadRequest", "code": status}
        return JSONResponse({"error": told}, status_code=status)

    # SGLang's middleware, if it runs, also checks the keys.
    auth_level(AuthLevel.ADMIN_OPTIONAL)(change)
    # fastapi would evaluate a string annotation in this module, which does not import it.
    change.__annotations__["request"] = Request
    for method, endpoint in {"GET": read, "POST": change}.items():
        http_server.app.add_api_route("/c2t", endpoint, methods=[method], response_model=None)


def _keys(server_args: Any) -> dict[str, str | None]:
    """Return the server's keys. Without an API key, an admin key that SGLang shows becomes None."""
    keys = {name: compat.argument(server_args, name) for name in ("api_key", "admin_api_key")}
    if keys["admin_api_key"] and not seams.keys_are_hidden():
        logger.warning(
            "C2T: this SGLang shows --admin-api-key on /server_info to %s",
            "clients with --api-key" if keys["api_key"] else "all clients: POST /c2t stays closed",
        )
        if not keys["api_key"]:
            keys["admin_api_key"] = None
    return keys


async def _post(manager: Any, body: bytes, start: C2TConfig) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    values = _parsed(body)
    in_force = C2TConfig.from_json((await _states(manager))[0]["config"], source="/c2t")
    config = changed(in_force, values, start)
    # Reads files: not on the event loop of all requests.
    await asyncio.to_thread(approved, config, start, compat.draft_shape(manager.server_args))
    token = _posting.set(True)
    try:
        taken = await manager.set_internal_state(
            SetInternalStateReq(server_args={_PREFIX + json.dumps(values): 1})
        )
    finally:
        _posting.reset(token)
    states = await _states(manager)
    if not all(taken):
        reasons = {state["control"]["refusal"] for state in states} - {None}
        why = "; ".join(sorted(reasons)) or "a scheduler refused the settings"
        if any(taken):
            raise RefusedError(
                500,
                f"only {sum(taken)} of {len(taken)} schedulers took the settings, GET /c2t says "
                f"which; post them again, or others: {why}",
            )
        raise ConfigError(why)
    return _told(states)


def _parsed(body: bytes) -> Any:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise ConfigError("the body is not valid JSON: it is not UTF-8") from None
    return parse_json(text, source="the body")


async def _states(manager: Any) -> list[dict[str, Any]]:
    """Each data-parallel scheduler's report (:mod:`~sglang_c2t.srt.hooks.reporting`) by rank."""
    states = [state["c2t"] for state in await manager.get_internal_state()]
    return sorted(states, key=itemgetter("dp_rank"))


def _told(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings in force, and each scheduler's switches, verification and planner state.
    If schedulers differ, it adds the settings of each.
    """
    each = [settings(C2TConfig.from_json(state["config"], source="/c2t")) for state in states]
    told = {**each[0], "switches": [state["control"]["switches"] for state in states]}
    if any(others != each[0] for others in each):
        told["differing"] = each
    for part in ("serving", "planner"):
        each_part = [state.get(part) for state in states]
        told |= {part: each_part} if any(each_part) else {}
    return told

"""SGLang's keys do not show in what a ``--c2t`` server says of itself.

``/server_info`` tells every argument, the keys among them, to whoever may read it: with
``--admin-api-key`` alone that is everybody, with both keys every client. The admin key would
protect nothing. All that SGLang 0.5.23 says of its arguments (HTTP, gRPC, logs) passes through two
functions; where an SGLang has none of them, see :func:`sglang_c2t.srt.seams.keys_are_hidden`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_c2t.config import active

HIDDEN = "<hidden by sglang-c2t>"
KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def hide_fields(result: dict[str, Any], _server_args: Any) -> dict[str, Any]:
    """AFTER hook on ``ServerArgs.resolved_dict``."""
    if active() is None:
        return result
    return {name: HIDDEN if name in KEYS and value else value for name, value in result.items()}


def hide_command(
    result: dict[str, Any], server_args: Any, *_args: Any, **_kwargs: Any
) -> dict[str, Any]:
    """AFTER hook on ``build_server_info``, which adds the command line."""
    command = result.get("launch_command")
    if active() is None or not isinstance(command, str):
        return result
    return {**result, "launch_command": _without(command, server_args)}


def _without(command: str, server_args: Any) -> str:
    """The command line less the keys, however their flags were spelt."""
    for key in (getattr(server_args, name, None) for name in KEYS):
        if key:
            command = command.replace(key, HIDDEN)
    return command


#: On the functions of ``seams.TOLD_ARGUMENTS``, in their order.
HOOKS: tuple[Callable[..., Any], ...] = (hide_fields, hide_command)

"""Hides SGLang's keys in the reports of a ``--c2t`` server.

``/server_info`` shows every argument, the keys included. With ``--admin-api-key`` alone any client
may read it, with both keys every client with a key. The admin key would then protect nothing. All
reports of SGLang 0.5.23 about its arguments (HTTP, gRPC, logs) pass through two functions. For an
SGLang without these see :func:`sglang_c2t.srt.seams.keys_are_hidden`.
"""

from __future__ import annotations

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
    """AFTER hook on ``build_server_info``, which adds the command line. One with a key is hidden
    as a whole: flags may be abbreviated or repeated, and keys may hold spaces.
    """
    if active() is None or not any(getattr(server_args, name, None) for name in KEYS):
        return result
    return {**result, "launch_command": HIDDEN}

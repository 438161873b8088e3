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
    """AFTER hook on ``build_server_info``, which adds the command line."""
    command = result.get("launch_command")
    if active() is None or not isinstance(command, str):
        return result
    # SGLang also records a call of ``Engine(...)``, whose arguments this hook does not parse.
    told = HIDDEN if command.startswith("Engine(") else _without(command, server_args)
    return {**result, "launch_command": told}


def _without(command: str, server_args: Any) -> str:
    """Return the command line without the values of flags that take a key, in any spelling.

    It goes by argument. Replacing a key's text would leave the rest of a longer key that begins
    with it, and would reveal a short key by the gaps. SGLang joins arguments by spaces, so a value
    with spaces spans as many words as the key has.
    """
    shown: list[str] = []
    hiding, words_left = False, 0
    for word in command.split(" "):
        if words_left or (hiding and not word.startswith("--")):
            words_left = max(words_left - 1, 0)
            continue
        flag, equals, _ = word.partition("=")
        key = _key_of(flag, server_args)
        hiding = key is not None
        if key is not None:
            words_left = str(getattr(server_args, key, "")).count(" ") + (not equals)
            word = f"{flag}{equals or ' '}{HIDDEN}"
        shown.append(word)
    return " ".join(shown)


def _key_of(flag: str, server_args: Any) -> str | None:
    """Key that argparse reads after this flag, abbreviated or not; otherwise ``None``."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in KEYS or not flag.startswith("--") or not name or hasattr(server_args, name):
        return name if name in KEYS else None
    return next((key for key in KEYS if key.startswith(name)), None)

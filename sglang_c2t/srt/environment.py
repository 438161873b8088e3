"""Settings from SGLang's environment variables; off in a release that lacks one."""

from __future__ import annotations

import os
from typing import Any


def envs() -> Any:
    """Return SGLang's variables; the import is late because every process loads this module."""
    from sglang.srt import environ

    return environ.envs


def is_on(name: str) -> bool:
    """Whether a switch is on that older SGLang does not have."""
    switch = getattr(envs(), name, None)
    return switch is not None and bool(switch.get())


#: SGLang's variable for the app that HTTP workers import, and our app, which loads the plugin.
HTTP_APP = "SGLANG_HTTP_SERVER_APP_PATH"
OUR_HTTP_APP = "sglang_c2t.srt.http_worker:app"


def names_http_app() -> bool:
    """Whether this SGLang lets HTTP workers import our app; older ones do not."""
    return hasattr(envs(), HTTP_APP)


def own_http_app() -> bool:
    """Whether the user set another app for the HTTP workers."""
    return names_http_app() and os.environ.get(HTTP_APP, OUR_HTTP_APP) != OUR_HTTP_APP

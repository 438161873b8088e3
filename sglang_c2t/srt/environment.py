"""Settings from SGLang's environment variables; off in a release that lacks one."""

from __future__ import annotations

import os
from typing import Any


def envs() -> Any:
    """Return SGLang's variables; the import is late because every process loads this module."""
    from sglang.srt import environ

    return environ.envs


def simulates_acceptance() -> bool:
    """Whether SGLANG_SIMULATE_ACC_LEN replaces real acceptance."""
    return bool(envs().SGLANG_SIMULATE_ACC_LEN.get() > 0)


def plans_on_another_stream() -> bool:
    """Whether verification is planned on a separate stream, before the draft is known."""
    return bool(envs().SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())


def verifies_beside_prefills() -> bool:
    """Whether data-parallel attention ranks verify while others prefill; older SGLang cannot."""
    coordinates = getattr(envs(), "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", None)
    return coordinates is not None and bool(coordinates.get())


#: SGLang's variable for the app that HTTP workers import, and our app, which loads the plugin.
HTTP_APP = "SGLANG_HTTP_SERVER_APP_PATH"
OUR_HTTP_APP = "sglang_c2t.srt.http_worker:app"


def names_http_app() -> bool:
    """Whether this SGLang lets HTTP workers import our app; older ones do not."""
    return hasattr(envs(), HTTP_APP)


def own_http_app() -> bool:
    """Whether the user set another app for the HTTP workers."""
    return names_http_app() and os.environ.get(HTTP_APP, OUR_HTTP_APP) != OUR_HTTP_APP


def serves_in_rust() -> bool:
    """Whether SGLang's Rust server reads requests; older releases do not have it."""
    serves = getattr(envs(), "SGLANG_RUST_SERVER", None)
    return serves is not None and bool(serves.get())

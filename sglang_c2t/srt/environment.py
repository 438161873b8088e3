"""What SGLang's environment variables ask for; a release that lacks one asks for nothing."""

from __future__ import annotations

import os
from typing import Any


def envs() -> Any:
    """SGLang's variables; imported late, as this module is loaded in every process."""
    from sglang.srt import environ

    return environ.envs


def simulates_acceptance() -> bool:
    """Whether SGLANG_SIMULATE_ACC_LEN replaces real acceptance."""
    return bool(envs().SGLANG_SIMULATE_ACC_LEN.get() > 0)


def plans_on_another_stream() -> bool:
    """Whether verification is planned on a stream of its own, before the draft is known."""
    return bool(envs().SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())


def verifies_beside_prefills() -> bool:
    """Whether ranks of data-parallel attention verify while others prefill; older SGLang cannot."""
    coordinates = getattr(envs(), "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", None)
    return coordinates is not None and bool(coordinates.get())


#: SGLang's name of the app that HTTP workers import, and ours, which loads the plugin there.
HTTP_APP = "SGLANG_HTTP_SERVER_APP_PATH"
OUR_HTTP_APP = "sglang_c2t.srt.http_worker:app"


def names_http_app() -> bool:
    """Whether this SGLang lets HTTP workers import an app of ours; older ones do not ask."""
    return hasattr(envs(), HTTP_APP)


def own_http_app() -> bool:
    """Whether the user has HTTP workers import an app of theirs."""
    return names_http_app() and os.environ.get(HTTP_APP, OUR_HTTP_APP) != OUR_HTTP_APP


def serves_in_rust() -> bool:
    """Whether requests are read by SGLang's Rust server, which older releases do not have."""
    serves = getattr(envs(), "SGLANG_RUST_SERVER", None)
    return serves is not None and bool(serves.get())

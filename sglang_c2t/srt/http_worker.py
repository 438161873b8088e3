"""SGLang's HTTP app, for the worker processes of ``--tokenizer-worker-num`` above 1. Each of them
imports the app by name, and SGLang loads no plugins there. Without this module ``/c2t`` and all
checks of requests would be missing. ``resolution.py`` sets it in SGLang.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``app`` to a worker, after loading the hooks."""
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    from sglang_c2t.srt import seams
    from sglang_c2t.srt.probes import SeamError

    load_plugins()
    if defects := seams.missing_hooks():  # SGLang only logs them
        raise SeamError("; ".join(defects))
    from sglang.srt.entrypoints.http_server import app

    return app

"""SGLang's HTTP app, for the worker processes of ``--tokenizer-worker-num`` above 1.

Each of them imports the app by its name, and SGLang loads no plugins there: without this module
``/c2t`` and all checks of requests would be gone. ``refusals.py`` names it to SGLang.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

from sglang_c2t.srt import seams
from sglang_c2t.srt.probes import SeamError

load_plugins()
if defects := seams.missing_hooks():  # SGLang logs them only
    raise SeamError("; ".join(defects))

from sglang.srt.entrypoints.http_server import app  # noqa: E402 - hooks come first

__all__ = ["app"]

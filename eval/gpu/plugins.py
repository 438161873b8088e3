"""Environment of a server that loads plugins from this checkout, which need not be installed.

SGLang finds plugins by the entry points of installed distributions. A folder with
``NAME-VERSION.dist-info`` is a distribution wherever it stands on ``sys.path``: ``site/``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).with_name("site")


def environment(names: Sequence[str]) -> dict[str, str]:
    """Variables that make a server load the plugins ``names`` of ``site/`` and no others."""
    parts = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, parts)),
        "SGLANG_PLUGINS": ",".join(names),
    }

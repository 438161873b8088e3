"""Entry points for a server that runs from a checkout: a folder to put on PYTHONPATH.

SGLang finds plugins by the entry points of installed distributions, in every process it
spawns. A folder with ``NAME-VERSION.dist-info`` is such a distribution wherever it stands on
``sys.path``, so nothing needs to be installed on the GPU machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_c2t import __version__

ROOT = Path(__file__).parents[2]
GROUP = "sglang.srt.plugins"

#: Distribution -> its entry points. The first is what installing this package would write.
C2T = {"c2t": "sglang_c2t.plugin:register"}
MEASURING = {
    "step_clock": "eval.gpu.step_clock:register",
    "graft": "eval.gpu.graft:register",
}
DISTRIBUTIONS: dict[str, Mapping[str, str]] = {
    "sglang_c2t": C2T,
    "sglang_c2t_measuring": MEASURING,
}


def write(folder: Path) -> Path:
    """Make ``folder`` declare all our plugins; returns it."""
    for name, points in DISTRIBUTIONS.items():
        info = folder / f"{name}-{__version__}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        dashed = name.replace("_", "-")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dashed}\nVersion: {__version__}\n"
        )
        lines = [f"[{GROUP}]", *(f"{point} = {target}" for point, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def environment(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """What makes a server load the plugins ``names``, and no other, of what is in ``folder``."""
    parts = [str(folder.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, parts)),
        "SGLANG_PLUGINS": ",".join(names),
    }

"""Stand-in for ``sgl_kernel`` where the wheel cannot be imported: the CPU ops SGLang needs.

It has exactly the ops of `sglang_c2t.cpu.OPS`; any other name raises an error with that name. The
wheel's distribution stays installed, so version checks through importlib.metadata still work.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from sglang_c2t.cpu import OPS

IS_STAND_IN = True


def _version() -> str:
    for distribution in ("sglang-kernel", "sgl-kernel"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "0.0.0"


__version__ = _version()


def __getattr__(name: str) -> Any:
    if name in OPS:
        return OPS[name].run
    # AttributeError, so that hasattr() and optional imports keep their meaning
    raise AttributeError(
        f"sgl_kernel.{name} is not available: the real sgl_kernel could not be imported "
        "(no CUDA driver), and the portable CPU runtime of sglang-c2t supplies only "
        f"{', '.join(sorted(OPS))}."
    )

"""The releases of SGLang that tests ran on; others are served where every seam is there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

#: Oldest first. The newest is what a checkout installs (requirements.lock) and the extra ``tested``
#: names; CI runs beside it and the oldest, `make parity SGLANG=...` beside the others.
TESTED = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")


def installed() -> str | None:
    """Version of the installed SGLang, if there is one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def untested() -> str | None:
    """One sentence where the installed SGLang is a release that no test ran on."""
    found = installed()
    if found is None or found in TESTED:
        return None
    return f"SGLang {found} is not tested with this version; tested: {', '.join(TESTED)}"

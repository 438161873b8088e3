"""The tested releases of SGLang; others are supported if every seam exists."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

#: Oldest first. A checkout and the extra ``tested`` install the newest (requirements.lock). CI runs
#: the newest and the oldest, `make parity SGLANG=...` the others.
TESTED = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")


def installed() -> str | None:
    """Version of the installed SGLang, if there is one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def untested() -> str | None:
    """Return one sentence if the installed SGLang is an untested release."""
    found = installed()
    if found is None or found in TESTED:
        return None
    return f"SGLang {found} is not tested with this version; tested: {', '.join(TESTED)}"

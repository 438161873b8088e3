"""Where numbers come from: revision, versions, hardware, command line."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_c2t import __version__

#: Packages whose version can change a number.
PACKAGES = ("sglang", "torch", "transformers", "flashinfer-python", "triton", "sgl-kernel", "numpy")


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Everything a result travels with; ``argv`` is the command line as typed."""
    return {
        "versions": versions(),
        "revision": git_revision(),
        "hardware": hardware(),
        "argv": list(argv),
        "command": shlex.join(argv),
    }


def conditions(module: str, argv: Sequence[str]) -> str:
    """The same as one paragraph, for tables: command, date, revision, versions, hardware.

    Folders in the command are shown as DIR: where they lie says nothing.
    """
    words = ["DIR" if Path(word).is_dir() else word for word in argv]
    machine = hardware()
    installed = ", ".join(f"{name} {number}" for name, number in versions().items())
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return (
        f"Made on {datetime.now(UTC):%Y-%m-%d} at {git_revision()} by "
        f"`{shlex.join(['python', '-m', module, *words])}`: {installed}; {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']:g} GiB, {gpus}, {machine['system']}."
    )


def versions() -> dict[str, str]:
    """Version of this package, of Python, and of what is installed of :data:`PACKAGES`."""
    found = {"sglang-c2t": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str:
    """Short commit of this checkout, marked when files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "no git checkout"


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory, GPUs, system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        # Without a build's own suffix, which names whoever built that kernel.
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the GPUs; their power limit as well, where nvidia-smi can tell it."""
    query = ["nvidia-smi", "--query-gpu=name,power.limit,driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.strip().splitlines() if ended.returncode == 0 else []

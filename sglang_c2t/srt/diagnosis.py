"""``python -m sglang_c2t check``: checks whether a server would start here."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from importlib.metadata import entry_points

from sglang_c2t import __version__
from sglang_c2t.config import ConfigError, active
from sglang_c2t.srt import versions

#: Exit codes. Bad input is 2, as with every command.
OK, NOT_OK, UNTESTED = 0, 1, 3


def diagnose(say: Callable[[str], None]) -> int:
    """Load the plugins as a server does, then check every seam; returns an exit code. It passes
    each line to ``say`` at once, because imports take up to a minute.
    """
    say(f"sglang-c2t {__version__}")
    if versions.installed() is None:
        return _verdict(
            say,
            [
                "SGLang is not installed: run `pip install 'sglang-c2t[tested]'` for the one "
                f"that the tests run on, {versions.TESTED[-1]}"
            ],
        )
    say("loading torch ...")
    import torch

    cuda, cpu_engine = torch.cuda.is_available(), os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    say(
        f"SGLang {versions.installed()}, torch {torch.__version__}, "
        f"CUDA {'available' if cuda else 'not available'}"
    )
    problems = device_problems(cuda=cuda, cpu_engine=cpu_engine)
    registered = any(
        ep.value == "sglang_c2t.plugin:register" for ep in entry_points(group="sglang.srt.plugins")
    )
    say(f"plugin entry point: {'registered' if registered else 'NOT registered'}")
    if not registered:
        problems.append("run `pip install` for this package again")
    problems += _seam_problems(say, cpu_engine=cpu_engine)
    for line in _cpu_lines(cpu_engine):
        say(line)
    try:
        config = active()
        say(f"environment: C2T {'off' if config is None else 'on, ' + config.to_json()}")
    except ConfigError as error:
        problems.append(str(error))
    return _verdict(say, problems)


def device_problems(*, cuda: bool, cpu_engine: bool) -> list[str]:
    """Return why a server would find no device; empty if it finds one."""
    if cuda or cpu_engine:
        return []
    return [
        "torch sees no CUDA device, so a server would end: check the driver "
        "(`nvidia-smi`), or serve on this CPU with SGLANG_USE_CPU_ENGINE=1 in the environment "
        "(also for this check) and --device cpu"
    ]


def _seam_problems(say: Callable[[str], None], *, cpu_engine: bool) -> list[str]:
    from sglang_c2t.srt import seams

    probed = (*seams.SEAMS, *seams.CPU_SEAMS) if cpu_engine else seams.SEAMS
    # This takes nearly all of the time: the seams' modules import most of SGLang.
    say(f"loading SGLang and looking at {len(probed)} seams, ten seconds to a minute ...")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # SGLang's imports print banners
            from sglang.srt.plugins import load_plugins

            load_plugins()
            defects = seams.broken_seams(probed) or seams.missing_hooks()
    except ImportError as error:
        return [f"SGLang {versions.installed()} cannot be imported here: {error}"]
    say(f"seams: {len(probed)} probed, {len(defects)} broken")
    return defects


def _cpu_lines(cpu_engine: bool) -> list[str]:
    if not cpu_engine:
        return []
    from sglang_c2t.srt.cpu import engine as runtime

    supplied = runtime.supplied()
    if not supplied:
        return ["CPU runtime: nothing supplied, this machine has it all"]
    return ["CPU runtime: supplied because this machine lacks it:", *(f"  {s}" for s in supplied)]


def _verdict(say: Callable[[str], None], problems: list[str]) -> int:
    untested = versions.untested()
    if problems:
        for problem in problems:
            say(f"PROBLEM: {problem}")
        if untested:
            say(untested)
        say("NOT ok: a server with --c2t will not start")
        return NOT_OK
    if untested:
        say(
            f"UNTESTED: {untested}. All seams are there, so a server with --c2t will start, but "
            "no test has checked their behaviour in this release. Measure it before you serve "
            "(`python -m eval.lossless` in a checkout), or install a tested release"
        )
        return UNTESTED
    say("ok: a server with --c2t will start")
    return OK

"""``python -m sglang_c2t check``: what a server started now would find."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

from sglang_c2t import __version__
from sglang_c2t.classifier.checkpoint import load_classifier
from sglang_c2t.config import ConfigError, active
from sglang_c2t.srt import compat

SHIPPED_NAMES = ("c2t", "c2t-log", "c2t-plus", "logistic", "mcsd")


@dataclass(frozen=True)
class Diagnosis:
    """Lines for a person, and whether ``--c2t`` would be served."""

    lines: list[str]
    healthy: bool


def diagnose() -> Diagnosis:
    """Load the plugins as a server does, then look at every seam."""
    lines = [
        f"sglang-c2t {__version__}",
        f"SGLang {compat.sglang_version()}, torch {torch.__version__}, "
        f"CUDA {'available' if torch.cuda.is_available() else 'not available'}",
    ]
    plugins = entry_points(group="sglang.srt.plugins")
    registered = any(ep.value == "sglang_c2t.plugin:register" for ep in plugins)
    lines.append(f"plugin entry point: {'registered' if registered else 'NOT registered'}")
    problems = [] if registered else ["run `pip install` for this package again"]

    from sglang.srt.plugins import load_plugins

    with contextlib.redirect_stdout(io.StringIO()):  # SGLang's imports print banners
        load_plugins()
    problems += compat.broken_seams() or compat.missing_hooks()
    lines.append(f"seams: {len(compat.SEAMS)} probed, {len(problems)} broken")

    for name in SHIPPED_NAMES:
        try:
            facts = load_classifier(name).training
            lines.append(f"classifier {name}: shipped, held-out AUC {facts['heldout_auc']}")
        except ConfigError as error:
            problems.append(str(error))
    lines += _cpu_lines()
    config = active()
    lines.append(f"environment: C2T {'off' if config is None else 'on, ' + config.to_json()}")
    lines += [f"PROBLEM: {problem}" for problem in problems]
    lines.append("ok: a server with --c2t will start" if not problems else "NOT ok")
    return Diagnosis(lines, healthy=not problems)


def _cpu_lines() -> list[str]:
    from sglang_c2t.srt import cpu_engine

    supplied = cpu_engine.supplied()
    if not supplied:
        return ["CPU runtime: nothing supplied (set SGLANG_USE_CPU_ENGINE=1 to serve on a CPU)"]
    return ["CPU runtime: supplied because this machine lacks it:", *(f"  {s}" for s in supplied)]

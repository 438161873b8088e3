"""The seams: every symbol of SGLang and FlashInfer that the plugin depends on, from ``seams.txt``.

SGLang's plugin loader logs and ignores exceptions, so a moved seam would leave a server that seems
right and runs without C2T. ``--c2t`` therefore refuses to start if a seam is missing. If releases
differ, the table lists each place, and ``compat.py`` uses the one that exists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from importlib import resources

from sglang_c2t.srt import versions
from sglang_c2t.srt.probes import Seam, SeamError

#: Attention backends that may read packed rows, by SGLang's name. ``verify/backends.py`` checks
#: the backend once it exists, and ``verify/trial.py`` tests it.
RAGGED_BACKENDS = ("fa3", "fa4", "flashinfer", "trtllm_mha", "trtllm_mla", "dsv4", "intel_amx")
#: Attention backends that read our tree masks; the one of the CPU is ours, see ``cpu/engine.py``.
TREE_BACKENDS = ("flashinfer", "intel_amx")

_LINE = re.compile(
    r"(?P<other>  or )?(?:hook (?P<hook>\w+) )?(?P<target>[\w.]+)(?: \((?P<parameters>[\w ]+)\))?"
    r"(?: \{(?P<fields>[\w ]+)\})?(?: needs (?P<needs>[\w.]+))?(?P<on_gpu> on_gpu)?"
    r"(?P<if_imported> if_imported)?"
)


def parse(table: str) -> dict[str, tuple[Seam, ...]]:
    """Parse the seams of each group of a table; :class:`ValueError` names an invalid line."""
    groups: dict[str, list[list[Seam]]] = {}
    group = use = ""
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            group, _, use = line.strip("[]").partition(": ")
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"no seam: {line!r}")
        get = found.groupdict(default="").__getitem__
        if not get("other"):
            groups.setdefault(group, []).append([])
        groups[group][-1].append(
            Seam(
                get("target"),
                use,
                parameters=get("parameters"),
                fields=get("fields"),
                hook=get("hook"),
                needs=get("needs"),
                on_gpu=bool(get("on_gpu")),
                if_imported=bool(get("if_imported")),
            )
        )
    return {name: tuple(map(_chained, places)) for name, places in groups.items()}


def _chained(places: Sequence[Seam]) -> Seam:
    *newer, oldest = places
    return reduce(lambda older, seam: replace(seam, otherwise=older), reversed(newer), oldest)


_TABLE = resources.files("sglang_c2t.srt").joinpath("seams.txt").read_text(encoding="utf-8")
GROUPS = parse(_TABLE)
SEAMS, CPU_SEAMS, ADAPTER_SEAMS = GROUPS["main"], GROUPS["cpu"], GROUPS["adapters"]
DATA_PARALLEL_SEAMS, HIDDEN_KEYS_SEAMS = GROUPS["data_parallel"], GROUPS["hidden_keys"]


def hook_targets(label: str) -> list[str]:
    """Return the targets that ``attach.hook`` wraps for a label of the table. They include a
    required one that this SGLang lacks: :func:`missing_hooks` reports it later.
    """
    labelled = [(group, seam) for group in GROUPS for seam in GROUPS[group] if seam.has_hook(label)]
    if not labelled:
        raise KeyError(f"seams.txt has no hook {label}")
    return [
        seam.chosen().target
        for group, seam in labelled
        if group != "optional" or seam.defect() is None
    ]


def can_hide_keys() -> bool:
    """Whether this SGLang reports its arguments through functions that can be hooked."""
    return not broken_seams(HIDDEN_KEYS_SEAMS)


def keys_are_hidden() -> bool:
    """Whether the hooks that keep keys out of ``/server_info`` are in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return all(seam.target in HookRegistry._patched for seam in HIDDEN_KEYS_SEAMS)


def broken_seams(seams: Sequence[Seam] = SEAMS) -> list[str]:
    """Return one sentence per seam that this SGLang does not offer; empty if all fit."""
    return [
        f"SGLang {versions.installed()} does not offer the seam {seam.target}: {defect}; "
        f"C2T needs it for {seam.use}"
        for seam in seams
        if (defect := seam.defect()) is not None
    ]


def missing_hooks() -> list[str]:
    """Return one sentence per hook that SGLang failed to apply; SGLang only logs these errors."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [
        f"SGLang {versions.installed()} did not apply the hook on {seam.target}; "
        f"C2T needs it for {seam.use}"
        for seam in map(Seam.chosen, SEAMS)
        if seam.hook and seam.target not in HookRegistry._patched
    ]


def require_seams(seams: Sequence[Seam] = SEAMS) -> None:
    """Raise :class:`SeamError` that names every broken seam."""
    if defects := broken_seams(seams):
        raise SeamError("; ".join(defects))

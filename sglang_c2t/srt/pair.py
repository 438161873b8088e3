"""The served pair of models, for comparison with a classifier's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from sglang_c2t.classifier.checkpoint import shipped_for, shipped_names
from sglang_c2t.classifier.pair import Pair, fingerprint
from sglang_c2t.srt import compat
from sglang_c2t.srt.tensor_parallel import all_ranks, host_broadcast_from_rank0


def served_pair(server_args: Any) -> Pair | None:
    """Served pair after its weights are loaded; ``None`` if their files are not found."""
    argument = partial(compat.argument, server_args)
    path, revision = argument("model_path"), argument("revision")
    target = _fingerprint(path, revision, argument("download_dir"))
    draft = target
    if compat.has_own_draft(server_args):
        path = argument("speculative_draft_model_path")
        revision = argument("speculative_draft_model_revision")
        draft = _fingerprint(path, revision, argument("download_dir"))
    if target is None or draft is None:
        return None
    return Pair(argument("speculative_algorithm"), target, draft)


def shipped_on_all_ranks(pair: Pair | None) -> str | None:
    """Return rank 0's :func:`shipped_for`: ranks with other gates would cut differently."""
    folders = ["", *sorted({name.rpartition("/")[0] for name in shipped_names() if "/" in name})]
    agree = host_broadcast_from_rank0(all_ranks()) or (lambda numbers: numbers)
    (number,) = agree([folders.index(shipped_for(pair) or "")])
    return folders[number] or None


def _fingerprint(path: str, revision: str | None, cache: str | None) -> str | None:
    if Path(path).exists():
        return fingerprint(Path(path))
    from huggingface_hub import snapshot_download

    try:  # SGLang's download folder
        folder = snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError):
        return None
    return fingerprint(Path(folder))

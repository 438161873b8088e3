"""Which pair a classifier learnt from: a speculative algorithm, a target's weights, a draft's.

Weights are known by a fingerprint of the files that hold them: the size of each, and 32 samples of
4 KB from its beginning to its end. The names of folders and files are not in it, so that a copy
elsewhere is the same model, and a model trained further is another. It is no proof: checkpoints
that differ only between the samples have the same fingerprint.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from sglang_c2t.files import require_regular

#: Files of weights; of several kinds in a folder the first is read.
WEIGHTS = ("model*.safetensors", "*.safetensors", "*.bin", "*.pt", "*.gguf")
SAMPLES = 32
SAMPLE_BYTES = 4096


class Pair(NamedTuple):
    """A draft model and the target that verifies its drafts."""

    algorithm: str
    target: str
    """Fingerprint."""

    draft: str
    """The same of the target where it holds the draft's layers."""


def fingerprint(path: Path) -> str | None:
    """16 hexadecimal digits of the weights in a folder, or of one file; ``None``: none can be read.

    At most 128 KB of each file are read.
    """
    found = (sorted(path.glob(pattern)) for pattern in WEIGHTS)
    digest = hashlib.sha256()
    try:
        files = [path] if path.is_file() else next(filter(None, found), [])
        for file in files:
            size = require_regular(file, sys.maxsize)
            digest.update(size.to_bytes(8, "little"))
            with open(file, "rb", buffering=0) as stream:
                for number in range(SAMPLES):
                    stream.seek(number * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                    digest.update(stream.read(min(size, SAMPLE_BYTES)) or b"")
    except OSError:
        return None
    return digest.hexdigest()[:16] if files else None


def pair_in(origin: dict[str, Any]) -> Pair | None:
    """The pair that a recording's origin names; ``None``: it does not, as before there were any."""
    weights = origin.get("weights")
    if not isinstance(weights, dict):
        return None
    parts = (origin.get("algorithm"), weights.get("target"), weights.get("draft"))
    texts = [part for part in parts if isinstance(part, str)]
    return Pair(*texts) if len(texts) == len(parts) else None


def origins_of(training: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the recordings were made that a classifier learnt from, as its card says."""
    origins = training.get("origins")
    return [one for one in origins if isinstance(one, dict)] if isinstance(origins, list) else []


def learnt_from(training: dict[str, Any], pair: Pair | None) -> str:
    """Whether a classifier learnt from this ``pair``: "this pair", "another pair", "several pairs";
    "an unknown pair" where one of them cannot be known.
    """
    names = ("algorithm", "target", "draft")
    pairs = {
        pair_in(one) or tuple(str(one.get(name)) for name in names) for one in origins_of(training)
    }
    if len(pairs) > 1:
        return "several pairs"
    if pair is None or not all(isinstance(one, Pair) for one in pairs) or not pairs:
        return "an unknown pair"
    return "this pair" if pairs == {pair} else "another pair"

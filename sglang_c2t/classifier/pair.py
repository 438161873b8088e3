"""The pair that a classifier learnt from: algorithm, weights of the target and of the draft.

Weights are identified by a fingerprint of their files: the size of each, and 32 samples of 4 KB
from its beginning to its end. Names of folders and files do not count, so a copy elsewhere is the
same model, and a model trained further is another. Checkpoints that differ only between the samples
have the same fingerprint.
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
    """Fingerprint; the target's if the target holds the draft's layers."""


def fingerprint(path: Path) -> str | None:
    """Return 16 hexadecimal digits for the weights in a folder or a file; ``None`` if unreadable.
    It reads at most 128 KB of each file.
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
    """Return the pair of a recording's origin; ``None`` if it has none, as older ones."""
    weights = origin.get("weights")
    if not isinstance(weights, dict):
        return None
    parts = (origin.get("algorithm"), weights.get("target"), weights.get("draft"))
    texts = [part for part in parts if isinstance(part, str)]
    return Pair(*texts) if len(texts) == len(parts) else None


def origins_of(training: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the origins of the recordings that a classifier learnt from, by its card."""
    origins = training.get("origins")
    return [one for one in origins if isinstance(one, dict)] if isinstance(origins, list) else []


def learnt_from(training: dict[str, Any], pair: Pair | None) -> str:
    """Return whether a classifier learnt from this ``pair``. The result is "this pair", "another
    pair", "several pairs" or "an unknown pair".
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

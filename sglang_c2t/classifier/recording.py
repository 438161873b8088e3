"""Recorded drafts on disk: features of every drafted token and whether it was accepted.

A recording is a directory of numbered ``safetensors`` shards. One row is one drafted
token; a token behind the first rejection counts as rejected, because the target never
gets to it. Columns, all of length n:

    joint    float32  P, product of the draft probabilities up to this token
    entropy  float32  H, nats
    prob     float32  the token's own draft probability
    depth    uint8    1 for the first drafted token
    accept   uint8    1 if the target accepted it
    request  int64    a number per request, the same for all its rows

The shard's metadata carries the :class:`FeatureSpec` and the draft's name, and reading
refuses to mix different ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_c2t.classifier.features import SERVED, FeatureSpec
from sglang_c2t.config import ConfigError

COLUMNS = {
    "joint": torch.float32,
    "entropy": torch.float32,
    "prob": torch.float32,
    "depth": torch.uint8,
    "accept": torch.uint8,
    "request": torch.int64,
}
SHARD_ROWS = 65_536


class RecordingWriter:
    """Collects rows in memory and writes a shard whenever ``shard_rows`` are together.

    ``origin`` names models and settings; it goes into each shard's metadata.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        origin: dict[str, Any],
        shard_rows: int = SHARD_ROWS,
    ) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._metadata = {
            "format": "c2t-recording",
            "features": json.dumps(SERVED.to_card(), sort_keys=True),
            "origin": json.dumps(origin, sort_keys=True),
        }
        self._shard_rows = shard_rows
        self._rows: list[dict[str, Tensor]] = []
        self._num_rows = 0
        self._num_shards = 0

    def add(self, rows: dict[str, Tensor]) -> None:
        """Append rows; ``rows`` holds every column, 1-D and of one length."""
        self._rows.append({name: rows[name].to(dtype) for name, dtype in COLUMNS.items()})
        self._num_rows += rows["joint"].numel()
        if self._num_rows >= self._shard_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory as one shard."""
        if not self._num_rows:
            return
        columns = {name: torch.cat([r[name] for r in self._rows]) for name in COLUMNS}
        # The process id keeps shards of two servers recording into one directory apart.
        name = f"shard-{os.getpid()}-{self._num_shards:05d}.safetensors"
        tmp = self._directory / f".{name}.tmp"
        save_file(columns, tmp, metadata=self._metadata)
        os.replace(tmp, self._directory / name)
        self._num_shards += 1
        self._rows, self._num_rows = [], 0


def read_recording(
    directory: str | os.PathLike[str],
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """All rows of a recording and the different origins of its shards.

    Raises :class:`ConfigError` for a missing, corrupt or mixed recording.
    """
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"no recording in {directory}: no *.safetensors shard found")
    shards: list[dict[str, Tensor]] = []
    origins: list[dict[str, Any]] = []
    for path in paths:
        columns, metadata = _read_shard(path)
        features = FeatureSpec.from_card(json.loads(metadata["features"]), source=str(path))
        if features != SERVED:
            raise ConfigError(f"{path} was recorded with other features than this version measures")
        shards.append(columns)
        origin = json.loads(metadata["origin"])
        if origin not in origins:
            origins.append(origin)
    return {name: torch.cat([s[name] for s in shards]) for name in COLUMNS}, origins


def _read_shard(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as shard:
            metadata = shard.metadata() or {}
            if metadata.get("format") != "c2t-recording" or set(shard.keys()) != set(COLUMNS):
                raise ConfigError(f"{path} is not a c2t recording")
            return {name: shard.get_tensor(name) for name in COLUMNS}, metadata
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read recording shard {path}: {error}") from error

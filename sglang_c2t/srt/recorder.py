"""``--c2t-record``: from verified chains in the server to rows of a recording.

Only verified tokens are written, because only they have a label. Record with
``--c2t-policy fixed``: a gate that ends drafts hides exactly the tokens it distrusts.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_c2t.chain import verified_rows
from sglang_c2t.classifier.recording import RecordingWriter
from sglang_c2t.config import C2TConfig
from sglang_c2t.policies import DraftLayer

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0


class Recorder:
    """Writes one row per verified draft token; rows reach the disk within seconds.

    A thread flushes, because a server under no load runs no step that could.
    """

    def __init__(self, writer: RecordingWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._stopped = False
        threading.Thread(target=self._flush_forever, daemon=True, name="c2t-record").start()

    @classmethod
    def from_config(cls, config: C2TConfig, server_args: Any) -> Recorder | None:
        """A recorder on rank 0 when recording is on, else ``None``."""
        if config.record is None or get_parallel().tp_group.rank_in_group != 0:
            return None
        origin = {
            # Names only: a card travels, and the paths of one machine mean nothing on another.
            "target": Path(server_args.model_path).name,
            "draft": Path(server_args.speculative_draft_model_path).name,
            "algorithm": server_args.speculative_algorithm,
            "num_steps": server_args.speculative_num_steps,
            "policy": config.policy,
        }
        return cls(RecordingWriter(config.record, origin=origin))

    def add(
        self, batch: Any, layers: list[DraftLayer], verify_lens: Tensor, accept_lens: Tensor
    ) -> None:
        """Record one verified step; ``verify_lens`` and ``accept_lens`` [B] count the root
        and the bonus token.
        """
        request = torch.tensor([zlib.crc32(req.rid.encode()) for req in batch.reqs])
        rows = verified_rows(layers, verify_lens, accept_lens, request)
        self._write(lambda: self._writer.add(rows))

    def _flush_forever(self) -> None:
        while not self._stopped:
            time.sleep(FLUSH_SECONDS)
            self._write(self._writer.flush)

    def _write(self, action: Callable[[], None]) -> None:
        """A full disk ends the recording, not the server."""
        with self._lock:
            if self._stopped:
                return
            try:
                action()
            except (OSError, SafetensorError) as error:
                self._stopped = True
                logger.error("C2T: recording stopped, serving goes on: %s", error)

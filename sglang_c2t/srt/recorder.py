"""``--c2t-record``: from verified chains in the server to drafts of a recording.

A share of the steps explores: the gate leaves its drafts whole, the target verifies all
of them, and the step is recorded. With ``--c2t-record-roots every`` each step explores and
commits a single token, so that the draft behind each token gets recorded.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_c2t.chain import matched_drafts
from sglang_c2t.classifier.recording import MEASURED, RecordingWriter
from sglang_c2t.config import C2TConfig
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.relay import Exploration
from sglang_c2t.srt.reporting import BEFORE_REPORT, RECORDING

logger = logging.getLogger(__name__)

#: Between writes of a server nobody asks; one file each, so not too often.
FLUSH_SECONDS = 60.0

# B requests, D drafted tokens


class Recorder(Exploration):
    """Writes the drafts of exploring steps.

    They reach the disk when a shard is full, after a minute, and whenever somebody reads
    the server's state. A thread minds the minute, because an idle server runs no step.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        *,
        share: float = 1.0,
        every_position: bool = False,
        extra: frozenset[str] = frozenset(),
    ) -> None:
        self.names = MEASURED | extra
        self.every_position = every_position
        self._extra = sorted(extra)
        self._share = share
        self._random = random.Random(0)
        self._writer = writer
        self._lock = threading.Lock()
        self._stopped = False
        threading.Thread(target=self._flush_forever, daemon=True, name="c2t-record").start()

    @classmethod
    def from_config(cls, config: C2TConfig, server_args: Any) -> Recorder | None:
        """A recorder when recording is on, else ``None``; it writes on rank 0 only."""
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
        writer = RecordingWriter(
            config.record,
            origin=origin,
            roots=config.record_roots,
            extra=config.record_extra,
            limit_bytes=round(config.record_limit_mb * 1e6),
        )
        RECORDING.directory = str(Path(config.record).resolve())
        recorder = cls(
            writer,
            share=1.0 if config.record_roots == "every" else config.record_share,
            every_position=config.record_roots == "every",
            extra=frozenset(config.record_extra),
        )
        BEFORE_REPORT.append(recorder.flush)
        return recorder

    def next_step_explores(self) -> bool:
        """Draw from the share; never again after the recording has stopped."""
        return not self._stopped and (self.every_position or self._random.random() < self._share)

    def add(
        self,
        batch: Any,
        layers: list[DraftLayer],
        recordable: Tensor,
        draft_tokens: Tensor,
        result: Any,
    ) -> None:
        """Record one exploring step.

        ``recordable`` [B] bool: the first token was measured in full. ``draft_tokens`` is
        [B * (D + 1)] with the roots, ``result`` what SGLang's ``verify`` returned.
        """
        if self._stopped or not layers:
            return
        width = len(layers) + 1
        # The host reads of recording: one per exploring step and column.
        if self.every_position:
            target = result.logits_output.next_token_logits.argmax(dim=-1)  # [B * (D + 1)]
            num_correct = matched_drafts(draft_tokens.view(-1, width), target.view(-1, width))
            plain = torch.tensor([_greedy(req) for req in batch.reqs])
            recordable = recordable.cpu() & plain
        else:
            num_correct = result.accept_lens - 1
        rows = recordable.cpu().nonzero().flatten()
        if not rows.numel():
            return
        reqs = [batch.reqs[i] for i in rows.tolist()]
        drafts = {
            "prompt": torch.tensor([_checksum(req.origin_input_ids) for req in reqs]),
            "position": batch.seq_lens.cpu()[rows],
        }
        nodes = chain_nodes(layers, rows, num_correct.cpu()[rows], self._extra)
        self._write(lambda: self._writer.add(nodes, drafts, [req.rid for req in reqs]))
        RECORDING.drafts += len(reqs)

    def _flush_forever(self) -> None:
        while not self._stopped:
            time.sleep(FLUSH_SECONDS)
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        self._write(self._writer.flush)

    def _write(self, action: Callable[[], None]) -> None:
        """A full disk ends the recording, not the server."""
        with self._lock:
            if self._stopped:
                return
            try:
                action()
                RECORDING.drafts_written = self._writer.drafts_written
            except (OSError, SafetensorError) as error:
                self._stopped = True
                RECORDING.stopped = str(error)
                logger.error("C2T: recording stopped, serving goes on: %s", error)


def chain_nodes(
    layers: list[DraftLayer], rows: Tensor, num_correct: Tensor, extra: list[str]
) -> dict[str, Tensor]:
    """Node columns of whole chains, draft by draft; ``num_correct`` is [len(rows)].

    A chain of 3 drafts whose first is accepted gives accept 1, 0, 0.
    """
    depth = torch.arange(1, len(layers) + 1)  # [D]
    num_drafts = len(rows)

    def column(per_layer: list[Tensor]) -> Tensor:
        return torch.stack([values.cpu()[rows] for values in per_layer], dim=1).flatten(0, 1)

    return {
        "draft": torch.arange(num_drafts).repeat_interleave(len(layers)),
        "parent": (depth - 2).repeat(num_drafts),
        "rank": torch.zeros(num_drafts * len(layers)),
        "depth": depth.repeat(num_drafts),
        "accept": (depth <= num_correct[:, None]).flatten(),
        "prob": column([layer.prob for layer in layers]),
        "joint": column([layer.joint for layer in layers]),
        "entropy": column([layer.entropy for layer in layers]),
        **{
            name: column([layer.measured[name] for layer in layers])
            for name in sorted(MEASURED | set(extra))
        },
    }


def _greedy(req: Any) -> bool:
    """Whether the target's choice is its argmax (SGLang serves temperature 0 as top_k 1)."""
    return req.sampling_params.top_k == 1 and req.grammar is None


def _checksum(token_ids: Any) -> int:
    """63 bits that are the same in every process: two CRCs over the ids."""
    data = array("q", token_ids).tobytes()
    return (zlib.crc32(data) << 31) ^ zlib.crc32(data[::-1])

"""``--c2t-record``: from verified chains and trees in the server to drafts of a recording.

A share of the steps explores: the gate cuts nothing (trees: it grows EAGLE-2's), the target
verifies all drafts, and the step is recorded. With ``--c2t-record-roots every`` each step explores
and commits a single token, so that the draft after each token is recorded.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_c2t.classifier.pair import Pair
from sglang_c2t.classifier.recording import MEASURED, RecordingWriter
from sglang_c2t.classifier.request_names import new_key, recorded_id
from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import matched_drafts
from sglang_c2t.draft.gate import Exploration
from sglang_c2t.draft_layer import DraftLayer, known_measurement
from sglang_c2t.policies.base import TreeLayer
from sglang_c2t.srt import compat
from sglang_c2t.srt.hooks.reporting import BEFORE_REPORT, RECORDING
from sglang_c2t.srt.hooks.requests import constrained
from sglang_c2t.tree import Trees, least_on_path

logger = logging.getLogger(__name__)

#: Seconds between writes without reports; each write makes a file.
FLUSH_SECONDS = 60.0

# B requests, D drafted tokens of a chain or layers of a tree, N nodes of a tree, M candidates,
# T rows of the target's forward, V vocabulary


class Recorder(Exploration):
    """Writes the drafts of exploration steps. It writes when a shard is full, after a minute, and
    when a client reads the server's state. A thread keeps the minute, because an idle server runs
    no step.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        *,
        share: float = 1.0,
        every_position: bool = False,
        own: Iterable[str] = (),
    ) -> None:
        self.names = MEASURED.union(own)
        self.every_position = every_position
        self._share = share
        self._random = random.Random(0)
        self.id_key = RECORDING.id_key = new_key()
        self._writer = writer
        self._lock = threading.Lock()
        self._stopped = False
        threading.Thread(target=self._flush_forever, daemon=True, name="c2t-record").start()

    @classmethod
    def from_config(
        cls, config: C2TConfig, server_args: Any, pair: Pair | None, policy: Any
    ) -> Recorder | None:
        """Return a recorder of this pair if recording is on, otherwise ``None``; only rank 0
        writes. It also records the ``policy``'s own measurements.
        """
        if config.record is None or get_parallel().tp_group.rank_in_group != 0:
            return None
        argument = partial(compat.argument, server_args)
        target = argument("model_path")
        shape = compat.draft_shape(server_args)
        origin = {
            # Names only: a card is shared, and paths are specific to a machine.
            "target": Path(target).name,
            # None: draft layers of the target's own checkpoint.
            "draft": Path(argument("speculative_draft_model_path") or target).name,
            "algorithm": argument("speculative_algorithm"),
            "weights": pair and {"target": pair.target, "draft": pair.draft},
            "num_steps": shape.num_steps,
            "topk": shape.topk,
            "num_draft_tokens": shape.num_draft_tokens,
            "policy": config.policy,
        }
        writer = RecordingWriter(
            config.record,
            origin=origin,
            roots=config.record_roots,
            limit_bytes=round(config.record_limit_mb * 1e6),
        )
        RECORDING.directory = str(Path(config.record).resolve())
        recorder = cls(
            writer,
            share=1.0 if config.record_roots == "every" else config.record_share,
            every_position=config.record_roots == "every",
            own=[name for name in policy.needs if not known_measurement(name)],
        )
        BEFORE_REPORT.append(recorder.flush)
        return recorder

    def next_step_explores(self) -> bool:
        """Draw from the share; false once the recording has stopped."""
        return not self._stopped and (self.every_position or self._random.random() < self._share)

    def add(
        self,
        batch: Any,
        layers: list[DraftLayer],
        recordable: Tensor,
        draft_tokens: Tensor,
        result: Any,
    ) -> None:
        """Record one exploration step of chains. ``recordable`` [B] bool: the first token has all
        measurements. ``draft_tokens`` is [B * (D + 1)] with the roots, ``result`` the return value
        of SGLang's ``verify``.
        """
        rows = self._rows(batch, recordable)
        if not rows.numel() or not layers:
            return
        width = len(layers) + 1
        if self.every_position:
            # After the drafts there may be padding rows of a captured graph.
            logits = result.logits_output.next_token_logits[: len(draft_tokens)]
            target = logits.argmax(dim=-1)  # [B * (D + 1)]
            num_correct = matched_drafts(draft_tokens.view(-1, width), target.view(-1, width))
        else:
            num_correct = result.accept_lens - 1
        self._put(batch, rows, chain_nodes(layers, rows, num_correct.cpu()[rows], self.names))

    def add_trees(
        self,
        batch: Any,
        layers: list[TreeLayer],
        recordable: Tensor,
        trees: Trees,
        target_rows: Tensor,
        accept_index: Tensor,
        result: Any,
    ) -> None:
        """Record one exploration step of trees, as :meth:`add`. ``trees`` are the verified trees
        with their roots. ``target_rows`` [B, N] is the row of each node in the target's forward,
        and ``accept_index`` [B, S] the accepted rows.
        """
        rows = self._rows(batch, recordable)
        if not rows.numel():
            return
        if self.every_position:
            target = result.logits_output.next_token_logits.argmax(dim=-1)  # [T]
            accepted = matched_nodes(trees, target[target_rows], len(layers))
        else:
            accepted = walked_nodes(target_rows, accept_index, result.accept_lens)
        self._put(batch, rows, tree_nodes(layers, trees, rows, accepted, self.names))

    def _rows(self, batch: Any, recordable: Tensor) -> Tensor:
        """[R] int64 on the host: the requests to record, of those ``recordable`` [B]."""
        if self._stopped:
            return torch.empty(0, dtype=torch.int64)
        # Recording waits for the device once per exploration step and column.
        recordable = recordable.cpu()
        # A classifier cannot predict the labels of constrained requests.
        free = recordable & ~torch.tensor([constrained(req) for req in batch.reqs])
        RECORDING.left_out += int((recordable & ~free).sum())
        recordable = free
        if self.every_position:
            recordable = recordable & torch.tensor([_greedy(req) for req in batch.reqs])
        return recordable.nonzero().flatten()

    def _put(self, batch: Any, rows: Tensor, nodes: dict[str, Tensor]) -> None:
        """Pass the drafts of the requests ``rows`` [R] to the writer."""
        reqs = [batch.reqs[i] for i in rows.tolist()]
        drafts = {
            "prompt": torch.tensor([_checksum(req.origin_input_ids) for req in reqs]),
            "position": batch.seq_lens.cpu()[rows],
        }
        ids = [recorded_id(req.rid, self.id_key) for req in reqs]
        self._write(lambda: self._writer.add(nodes, drafts, ids))
        RECORDING.drafts += len(reqs)

    def _flush_forever(self) -> None:
        while not self._stopped:
            time.sleep(FLUSH_SECONDS)
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        self._write(self._writer.flush)

    def _write(self, action: Callable[[], None]) -> None:
        """Run ``action``; a full disk ends the recording, not the server."""
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
    layers: list[DraftLayer], rows: Tensor, num_correct: Tensor, names: Collection[str]
) -> dict[str, Tensor]:
    """Return node columns of full chains with the measurements ``names``; ``num_correct``
    [len(rows)]. A chain of 3 drafts whose first is accepted gives accept 1, 0, 0.
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
        **{name: column([layer.measured[name] for layer in layers]) for name in sorted(names)},
    }


def tree_nodes(
    layers: list[TreeLayer],
    trees: Trees,
    rows: Tensor,
    accepted: Tensor,
    names: Collection[str],
) -> dict[str, Tensor]:
    """Return node columns of the trees ``rows`` [R], tree by tree, without roots. ``accepted`` is
    [B, N] bool, ``names`` are measurements. Tree root -> a b, a -> c, all but b accepted: parents
    -1, -1, 0 and accept 1, 0, 1.
    """
    topk = layers[0].topk
    parents = trees.parents.cpu()[rows]  # [R, N]
    live = parents >= 0
    draft = live.nonzero()[:, 0]  # [n], like every column
    source = trees.source.cpu()[rows][live]

    def column(per_layer: list[Tensor]) -> Tensor:
        """Gather values [B * W * K, ...] of each layer."""
        batch = layers[0].batch
        candidates = torch.cat([v.view(batch, -1, *v.shape[1:]) for v in per_layer], dim=1)
        return candidates.cpu()[rows[draft], source]  # of [B, M, ...]

    def measurement(name: str) -> Tensor:
        return column([layer.nodes.measured[name] for layer in layers])

    return {
        "draft": draft,
        "parent": parents[live] - 1,  # nodes count the root, drafts do not
        "rank": source % topk,
        "depth": trees.depth.cpu()[rows][live],
        "accept": accepted.cpu()[rows][live],
        "prob": column([layer.nodes.prob for layer in layers]),
        "joint": column([layer.nodes.joint for layer in layers]),
        "entropy": column([layer.nodes.entropy for layer in layers]),
        **{name: measurement(name) for name in sorted(names)},
    }


def matched_nodes(trees: Trees, target: Tensor, num_steps: int) -> Tensor:
    """[B, N] bool: nodes on the path that a greedy target takes; false for the root. ``target`` [B,
    N] is the target's choice after each node. Siblings differ, so there is one path.
    """
    wanted = target.gather(1, trees.parents.clamp(min=0))
    matched = (trees.parents >= 0) & (trees.tokens == wanted)
    above = torch.where(trees.parents > 0, trees.parents, -1)  # paths start after the root
    return least_on_path(matched.long(), above, num_steps).bool()


def walked_nodes(target_rows: Tensor, accept_index: Tensor, accept_lens: Tensor) -> Tensor:
    """[B, N] bool: nodes on the accepted path, root included. ``accept_index`` [B, S] are rows like
    ``target_rows`` [B, N], the first ``accept_lens`` [B] of them on the path.
    """
    place = torch.arange(accept_index.shape[1], device=accept_index.device)
    node = accept_index.long() - target_rows[:, :1]
    # Entries after the path select the root, which is on the path.
    node = node.masked_fill(place >= accept_lens[:, None], 0)
    return torch.zeros_like(target_rows, dtype=torch.bool).scatter(1, node, True)


def _greedy(req: Any) -> bool:
    """Whether the target's choice is its argmax (SGLang serves temperature 0 as top_k 1)."""
    return req.sampling_params.top_k == 1 and req.grammar is None


def _checksum(token_ids: Any) -> int:
    """63 bits that are the same in every process: two CRCs over the ids."""
    data = array("q", token_ids).tobytes()
    return (zlib.crc32(data) << 31) ^ zlib.crc32(data[::-1])

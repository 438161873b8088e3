"""A tree policy that writes down, inside the server, what was verified and what KV is left."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_c2t.policies.base import Growth, TreeLayer
from tests.e2e.server_policies import SwitchableTree

WATCHED = "kv-"
"""Requests whose id begins so leave all their KV rows behind."""


@dataclass
class VerifyRecorder(SwitchableTree):
    """Silent until the folder ``notes`` exists. Then each verification adds the sizes of its
    trees to ``sizes.jsonl``, and prefills and verifications save the KV rows of every
    committed token of the watched requests as ``<request id>.<tokens>.pt``.
    """

    notes: str = ""
    name: ClassVar[str] = "verify-recorder"

    def grow(self, layer: TreeLayer) -> Growth:
        """The hooks go in where drafts are made; the launcher only tries the policy."""
        if "sglang_c2t.srt.worker" in sys.modules:
            _watch_worker(Path(self.notes))
        return super().grow(layer)


@functools.cache
def _watch_worker(notes: Path) -> None:
    from sglang_c2t.srt.draft.workers import C2TEagleDraftWorker
    from sglang_c2t.srt.worker import C2TEagleWorker

    verify, extend = C2TEagleWorker.verify, C2TEagleDraftWorker._draft_extend_for_prefill

    @functools.wraps(verify)
    def noted_verify(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle() or not notes.exists():
            return verify(worker, batch, *args, **kwargs)
        # By the end of the verification the scheduler may have given rows away.
        before, rows = batch.seq_lens.tolist(), _rows(batch)
        result = verify(worker, batch, *args, **kwargs)
        with (notes / "sizes.jsonl").open("a") as sizes:
            sizes.write(json.dumps(result.cap_lens.tolist()) + "\n")
        accepted = result.accept_lens.tolist()
        lengths = [n + more for n, more in zip(before, accepted, strict=True)]
        _save(notes, worker.target_worker, batch, rows, lengths)
        return result

    @functools.wraps(extend)
    def noted_extend(draft: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_idle() and notes.exists():
            _save(notes, draft.target_worker, batch, _rows(batch), batch.seq_lens.tolist())
        return extend(draft, batch, *args, **kwargs)

    hooks: dict[Any, tuple[str, Callable[..., Any]]] = {
        C2TEagleWorker: ("verify", noted_verify),
        C2TEagleDraftWorker: ("_draft_extend_for_prefill", noted_extend),
    }
    for owner, (name, hook) in hooks.items():
        setattr(owner, name, hook)


def _rows(batch: Any) -> Tensor:
    """[B, pool width]: the KV slots of each request of the batch."""
    return batch.req_to_token_pool.req_to_token[batch.req_pool_indices].clone()


def _save(notes: Path, target: Any, batch: Any, rows: Tensor, lengths: list[int]) -> None:
    pool = target.model_runner.token_to_kv_pool
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for request, row, length in zip(batch.reqs, rows, lengths, strict=True):
        if request.rid.startswith(WATCHED):
            kv = torch.stack([buffer[row[:length].long()] for buffer in buffers])
            torch.save(kv, notes / f"{request.rid}.{length}.pt")

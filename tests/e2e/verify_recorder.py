"""A tree policy that writes down, inside the server, what was verified."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sglang_c2t.policies.base import Growth, TreeLayer
from tests.e2e.server_policies import SwitchableTree


@dataclass
class VerifyRecorder(SwitchableTree):
    """Silent until the folder ``notes`` exists. Then each verification adds the sizes of its
    trees to ``sizes.jsonl``.
    """

    notes: str = ""
    name: ClassVar[str] = "verify-recorder"

    def grow(self, layer: TreeLayer) -> Growth:
        """The hook goes in where drafts are made; the launcher only tries the policy."""
        if "sglang_c2t.srt.worker" in sys.modules:
            _watch_worker(Path(self.notes))
        return super().grow(layer)


@functools.cache
def _watch_worker(notes: Path) -> None:
    from sglang_c2t.srt.worker import C2TEagleWorker

    verify = C2TEagleWorker.verify

    @functools.wraps(verify)
    def noted_verify(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle() or not notes.exists():
            return verify(worker, batch, *args, **kwargs)
        result = verify(worker, batch, *args, **kwargs)
        with (notes / "sizes.jsonl").open("a") as sizes:
            sizes.write(json.dumps(result.cap_lens.tolist()) + "\n")
        return result

    C2TEagleWorker.verify = noted_verify  # type: ignore[method-assign]

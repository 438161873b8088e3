"""SGLang's draft workers, which delegate drafting to a drafter. They decide nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from sglang_c2t.srt.draft.drafter import Drafter
from sglang_c2t.srt.draft.host import Host


class C2TEagleDraftWorker(EagleDraftWorker):
    """Draft worker of EAGLE, EAGLE3 and NEXTN; owns its drafter once memory is allocated."""

    make_drafter: Callable[[Host], Drafter]
    """Makes the drafter; set before memory is allocated."""

    drafter: Drafter

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Allocate memory, then make the drafter."""
        super().alloc_memory_pool(*args, **kwargs)
        self.drafter = self.make_drafter(Host(self))

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        self.drafter.capture(partial(super()._capture_cuda_graphs, *args, **kwargs))

    def draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """See :meth:`Drafter.draft`."""
        return self.drafter.draft(batch, partial(super().draft, batch, *args, **kwargs))

    def draft_forward(self, forward_batch: Any) -> Any:
        """See :meth:`Drafter.loop`."""
        stock = partial(super().draft_forward, forward_batch)
        return self.drafter.draft_forward(forward_batch, stock)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        stock = partial(super()._draft_extend_for_prefill, batch, *args, **kwargs)
        return self.drafter.extend_prefill(batch, stock)

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        stock = partial(super()._draft_extend_for_decode, **kwargs)
        self.drafter.extend_decode(batch, batch_result, stock)


class C2TStandaloneDraftWorker(C2TEagleDraftWorker, StandaloneDraftWorker):
    """Draft worker of STANDALONE."""

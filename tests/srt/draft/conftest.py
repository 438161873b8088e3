"""Fixtures for tests of the drafter and of its host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.speculative import eagle_worker_v2

from sglang_c2t.srt.draft.drafter import Drafter
from sglang_c2t.srt.draft.host import Host
from tests.srt.draft.stock_worker import StockWorker, Worker, built


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make our draft worker over the double, with a drafter for its host."""
    monkeypatch.setattr(eagle_worker_v2, "build_eagle_verify_input", built)
    stock = type("Stock", (StockWorker, eagle_worker_v2.EagleDraftWorker), {})

    def make(make_drafter: Callable[[Host], Drafter], *, graphs: bool = False, **shape: int) -> Any:
        worker: Any = type("Over", (Worker, stock), {})(**shape)
        worker.make_drafter = make_drafter
        worker.alloc_memory_pool()
        if graphs:
            worker._capture_cuda_graphs()
        worker.layers_run.clear()
        return worker

    return make

"""Learns from the steps that were, for the next: draft depth, and whether packing pays.

Sizes of a step reach the host while it runs and are looked at in the next one; device times
of target forwards come from events that are read once they are over. Nothing here waits for
the device, except that ranks of a tensor-parallel server agree on the measured times once in
:data:`AGREE_EVERY` steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.plan.load import DraftDepth, PackingRule
from sglang_c2t.srt.verify.packing import HostSizes, Packing
from sglang_c2t.srt.verify.timing import Mark, timed_forward

AGREE_EVERY = 64
"""Steps between two looks at the measured times."""


class Feedback:
    """What the server has learnt; see :mod:`sglang_c2t.plan.load` for what follows from it.

    Args:
        on_cuda: Whether verify forwards run on a GPU, where packing has a price.
        max_rows: Rows of a batch that may be verified; ``None``: no limit.
        agree: Makes a tensor equal on all tensor-parallel ranks; ``None`` on one rank.
    """

    def __init__(
        self,
        on_cuda: bool,
        agree: Callable[[Tensor], Tensor] | None = None,
        max_rows: int | None = None,
    ) -> None:
        self._agree = agree
        self._max_rows = max_rows
        self._rule = PackingRule()
        self._steps = 0
        self._previous: tuple[HostSizes, DraftDepth | None, int] | None = None
        self._rows_per_request: float | None = None
        self._timed: deque[tuple[int, Mark, Mark]] = deque()  # rows, begin and end of forwards
        self._on_cuda = on_cuda

    def start(self, sizes: Tensor, depth: DraftDepth | None = None) -> HostSizes:
        """Send the rows of each request [B] to the host; learn from those of the step before.

        ``depth`` chose how many layers this step drafted.
        """
        previous = self._previous
        on_their_way = HostSizes(sizes)
        self._previous = on_their_way, depth, depth.steps if depth else 0
        if previous is not None:
            arrived, chooser, drafted = previous
            rows = arrived.wait().tolist()
            self._rows_per_request = sum(rows) / max(len(rows), 1)
            if chooser is not None:
                chooser.observe(rows, drafted)
        self._steps += 1
        if self._on_cuda and self._steps % AGREE_EVERY == 0:
            self._decide()
        return on_their_way

    def packs(self, requests: int, width: int) -> bool:
        """Whether the next verification is worth packing: B ``requests`` of up to N rows."""
        if not self._on_cuda or self._rows_per_request is None:
            return True
        if self._max_rows is not None and requests * width > self._max_rows:
            return True
        return self._rule.pays(requests * width, requests * self._rows_per_request)

    @contextmanager
    def timing(self, target_worker: Any, verify_input: Any) -> Iterator[None]:
        """Time the forward of ``verify_input`` inside the block; on CUDA of a packed one."""
        packing: Packing | None = verify_input.packing
        if self._on_cuda and packing is None:
            yield
            return

        def launching() -> None:
            if packing is not None and packing.arrived is not None:
                self._rule.waited((time.perf_counter() - packing.arrived) * 1e3)

        with timed_forward(target_worker, self._on_cuda, launching) as (begin, end):
            yield
        self._timed.append((verify_input.forwarded_rows, begin, end))
        while self._timed and self._timed[0][2].passed:
            rows, begin, end = self._timed.popleft()
            self._rule.forward_took(rows, begin.until(end))

    @property
    def row_ms(self) -> tuple[float, float] | None:
        """Milliseconds that the target takes for a row, and their standard error, lately."""
        return self._rule.row_ms

    def _decide(self) -> None:
        per_row, wait = self._rule.measured
        if self._agree is not None:
            measured = torch.tensor([per_row, wait], dtype=torch.float32, device="cuda")
            per_row, wait = self._agree(measured).tolist()
        self._rule.decide_on(per_row, wait)


def choose_packing(
    feedback: Feedback,
    num_rows: Tensor,
    width: int,
    *,
    depth: DraftDepth | None = None,
    packed: bool = True,
    **trees: Any,
) -> Packing:
    """The rows to verify: ``num_rows`` [B] of each request, or all N where that is cheaper.

    Rows behind a cut are forwarded but lie behind its links, so the output is the same.
    """
    sizes = feedback.start(num_rows, depth)
    if packed and feedback.packs(len(num_rows), width):
        return Packing(num_rows, width, sizes=sizes, **trees)
    return Packing.full(len(num_rows), width, num_rows.device, **trees)

"""An SGLang plugin that logs when each step of the scheduler ended and what it computed.

``/server_info`` returns one row per decoded batch under ``step_clock``. Throughput is read off the
server's own steps, without a client's delays and without prefill. Works with and without
speculation, and costs two passes over the batch's requests on the host, equal for every method.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PROCESS_RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
KEY = "step_clock"


class Step(NamedTuple):
    """One batch whose result has reached the host."""

    seconds: float  # when its result had been processed, on the scheduler's own clock
    batch: int  # requests; 0 for a prefill
    tokens: int  # output tokens that it appended, over all requests
    rows: int  # rows of the target's forward, padding not counted


#: The latest steps, many times as many as a measurement takes.
_steps: deque[Step] = deque(maxlen=10_000)


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(PROCESS_RESULT, _timed, HookType.AROUND)
    HookRegistry.register(INTERNAL_STATE, _report, HookType.AFTER)


def _timed(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND hook on ``process_batch_result``."""
    reqs = list(batch.reqs) if batch.forward_mode.is_decode() else []
    before = sum(len(req.output_ids) for req in reqs)
    done = original(scheduler, batch, result, *args, **kw)
    now = time.perf_counter()
    tokens = sum(len(req.output_ids) for req in reqs) - before
    _steps.append(Step(now, len(reqs), tokens, _rows(len(reqs), result)))
    return done


def _rows(batch: int, result: Any) -> int:
    """Rows verified: those of each request where a gate chose them, else the full width."""
    cap_lens = getattr(result, "cap_lens", None)
    if batch and cap_lens is not None and not getattr(cap_lens, "is_cuda", False):
        return int(cap_lens.sum())  # on the host since its result was processed
    return batch * int(getattr(result, "speculative_num_draft_tokens", None) or 1)


def _report(result: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook on ``get_internal_state``. Keeps the steps, because other clients ask too."""
    result.internal_state[KEY] = [list(step) for step in _steps]


def since(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> list[Any]:
    """Steps of the reading ``after`` that the reading ``before`` did not have."""
    last = before[-1][0] if before else -math.inf
    return [step for step in after if step[0] > last]


class Span(NamedTuple):
    """Decode steps, added up."""

    seconds: float
    tokens: int
    steps: int
    rows: int


def decoding(steps: Sequence[Sequence[float]]) -> Span:
    """Add up all decode steps, of any batch; ValueError where there is none.

    Every method has then done the same work. A step's time is the distance to the row before it.
    Where the scheduler overlaps steps, the first one after a prefill holds some of that.
    """
    timed = [(row[0] - last[0], row) for last, row in itertools.pairwise(steps) if row[1] > 0]
    if not timed:
        raise ValueError(f"no decode step among {len(steps)}: longer answers, or more requests")
    seconds = math.fsum(took for took, _ in timed)
    tokens, rows = (int(sum(row[column] for _, row in timed)) for column in (2, 3))
    return Span(seconds, tokens, len(timed), rows)

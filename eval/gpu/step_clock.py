"""An SGLang plugin: when each step of the scheduler ended, and what it brought.

One row per decoded batch, kept in the scheduler and handed out by ``/server_info`` under
``step_clock``: throughput is read off the server's own steps, without a client's delays and
without prefill. Works with and without speculation.

Costs two passes over the batch's requests on the host, the same for every method.
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

    seconds: float
    """When its result had been processed, on the scheduler's own clock."""

    batch: int
    """Requests; 0 for a prefill, which breaks the row of steps."""

    unfinished: int
    """Of them, those that still decoded when the result came."""

    tokens: int
    """Output tokens that it appended, over all requests."""

    rows: int
    """Rows that the target was asked to forward, padding not counted."""


#: The latest ones, many times as many as a measurement takes.
_steps: deque[Step] = deque(maxlen=10_000)


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(PROCESS_RESULT, _timed, HookType.AROUND)
    HookRegistry.register(INTERNAL_STATE, _hand_out, HookType.AFTER)


def _timed(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND hook on ``process_batch_result``."""
    if not batch.forward_mode.is_decode():
        done = original(scheduler, batch, result, *args, **kw)
        _steps.append(Step(time.perf_counter(), 0, 0, 0, 0))
        return done
    reqs = list(batch.reqs)
    unfinished = sum(not req.finished() for req in reqs)
    before = sum(len(req.output_ids) for req in reqs)
    done = original(scheduler, batch, result, *args, **kw)
    now = time.perf_counter()
    tokens = sum(len(req.output_ids) for req in reqs) - before
    _steps.append(Step(now, len(reqs), unfinished, tokens, _rows(len(reqs), result)))
    return done


def _rows(batch: int, result: Any) -> int:
    """Rows verified: those of each request where a gate chose them, else the full width."""
    cap_lens = getattr(result, "cap_lens", None)
    if cap_lens is not None and not getattr(cap_lens, "is_cuda", False):
        return int(cap_lens.sum())  # on the host since its result was processed
    return batch * int(getattr(result, "speculative_num_draft_tokens", None) or 1)


def _hand_out(result: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook on ``get_internal_state``. Forgets nothing: others ask as well, such as SGLang's
    benchmark client.
    """
    result.internal_state[KEY] = [list(step) for step in _steps]


def since(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> list[Any]:
    """Steps of the reading ``after`` that the one ``before`` did not have."""
    last = before[-1][0] if before else -math.inf
    return [step for step in after if step[0] > last]


class Span(NamedTuple):
    """Decode steps, added up."""

    seconds: float
    tokens: int
    steps: int
    rows: int


def decoding(steps: Sequence[Sequence[float]]) -> Span:
    """All decode steps, of whatever batch: what answers take without their prefill.

    Every method has then done the same work. A step's time is the distance to what came before it;
    where the scheduler overlaps steps, the first one behind a prefill holds some of that.

    Raises ValueError where there is none.
    """
    timed = [(row[0] - last[0], row) for last, row in itertools.pairwise(steps) if row[1] > 0]
    if not timed:
        raise ValueError(f"no decode step among {len(steps)}: longer answers, or more requests")
    seconds = math.fsum(took for took, _ in timed)
    tokens, rows = (int(sum(row[column] for _, row in timed)) for column in (3, 4))
    return Span(seconds, tokens, len(timed), rows)


def full_batch(steps: Sequence[Sequence[float]], batch: int, skip: int = 2) -> Span:
    """All stretches of steps in which ``batch`` requests decoded and none had finished.

    Not fair to who gives all requests the same where another serves the sure ones first: these end
    first, and what is slow stands behind the end of the stretch. :func:`decoding` is.

    The first ``skip`` steps of each are left out, because they still overlap the prefill. A step's
    time is the distance to the step before it. With skip 0, steps at 1.0, 1.1, 1.3 s of 4 tokens
    each: 0.3 s, 8 tokens, 2 steps.

    Raises ValueError when fewer than two steps remain in every stretch.
    """
    runs: list[list[Step]] = [[]]
    for row in steps:
        step = Step(row[0], *(int(value) for value in row[1:]))
        if step.batch == batch == step.unfinished:
            runs[-1].append(step)
        elif runs[-1]:
            runs.append([])
    kept = [run[skip:] for run in runs if len(run) >= skip + 2]
    if not kept:
        most = max(len(run[skip:]) for run in runs)
        raise ValueError(
            f"the whole batch of {batch} decoded for {most} steps only, of {len(steps)} in "
            "all: longer answers, or fewer requests"
        )
    timed = [step for run in kept for step in run[1:]]
    return Span(
        sum(run[-1].seconds - run[0].seconds for run in kept),
        sum(step.tokens for step in timed),
        len(timed),
        sum(step.rows for step in timed),
    )

"""Measures the cost of steps on this machine before the first request.

A warm-up step has dummy requests, all in the padding row of SGLang's request table, whose KV slot
is the padding slot. It allocates nothing, and no request reads what it writes. Otherwise it equals
serving: the same worker drafts, verifies and is timed, in its CUDA graphs if it has some.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sglang_c2t.plan.cost import SEED, StepCost
from sglang_c2t.plan.tiers import spread
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.dummy import dummy_batch
from sglang_c2t.srt.tensor_parallel import all_ranks, host_broadcast_from_rank0

logger = logging.getLogger(__name__)

# B requests, N rows of a full draft, T rows of a verification

#: Steps per size: the first is slow, and the least of so few counts.
MEASURED = SEED

#: Most seconds for all. Sizes beyond it are skipped; curves interpolate and extrapolate.
SECONDS = 15.0

#: Most seconds for one step. Larger steps are compute-bound, and the curve extrapolates them.
#: Otherwise they would take the time of small sizes, where each row counts.
DEAREST = SECONDS / 10

#: Seconds after which a size needs no third measurement: pauses matter little in long steps.
ENOUGH_SECONDS = 0.5

#: Most rows of the steps that measure what a request adds, and a token of context.
COMPARED_ROWS = 16

#: Tokens of context of a dummy request, and fewer to compare with.
CONTEXT, SHORT = 256, 16


@torch.no_grad()
def seed_costs(planning: Planning, worker: Any) -> None:
    """Measure verification at several row counts, and draft layers at their batch sizes.

    It does nothing if the planner already has costs.

    Args:
        planning: Its planner learns the costs.
        worker: SGLang's speculative worker, ready to serve.
    """
    # Ranks that forward together measure together.
    agree = host_broadcast_from_rank0(all_ranks()) or (lambda numbers: numbers)
    (known,) = agree([planning.planner.cost.verify.known])
    if known:
        return
    width = worker.speculative_num_draft_tokens
    most = worker.target_worker.model_runner.max_running_requests
    span, between = spread(planning.row_counts(most))

    def step(rows: int, requests: int, length: int, *, learn: bool) -> None:
        batch = _dummy_batch(worker, requests, length)
        layers = planning.planner.max_depth
        made = planning.warm_up_step(
            requests, layers=layers, rows=rows, context=int(batch.seq_lens_sum)
        )
        batch.spec_info.c2t_step = made
        worker.forward_batch_generation(batch)
        if learn:
            planning.learn_warm_up(made)

    fewest = lambda rows: (rows, -(-rows // width), CONTEXT)  # noqa: E731
    compared = max(rows for rows in (*span, *between) if rows <= min(COMPARED_ROWS, most))
    step(*fewest(compared), learn=False)  # compiles once per server
    began = time.perf_counter()
    # Seconds of steps, by rows, requests and the length of their contexts.
    took: dict[tuple[int, int, int], list[float]] = {}
    seconds, size = 0.0, span[0]  # of the last step
    # In rounds, because memory that grows with a size makes later small steps faster, and because
    # a slow moment of the machine must not meet all measurements of a size.
    alone = [(compared, compared, length) for length in (CONTEXT, SHORT)]
    rounds = [*map(fewest, span), fewest(compared), *alone] * MEASURED
    further = [fewest(rows) for rows in between if rows != compared]
    for sizes in [*rounds, *further * MEASURED]:
        (rows, *_), mine, now = sizes, took.setdefault(sizes, []), time.perf_counter()
        # A further row rarely costs more than the rows before it did.
        expected = min(mine) if mine else seconds * rows / size
        late = expected > min(began + SECONDS - now, DEAREST)
        (enough,) = agree([late or (len(mine) > 1 and sum(mine) > ENOUGH_SECONDS)])
        if not enough:
            # The time may end after one round, and the first step of a size is slow.
            step(*sizes, learn=bool(mine) or sizes not in further)
            seconds, size = time.perf_counter() - now, rows
            mine.append(seconds)
    _tell(planning.planner.cost, time.perf_counter() - began)


def _tell(cost: StepCost, seconds: float) -> None:
    """Log what was measured in so many ``seconds``."""
    curves = cost.state().items()
    told = {name: {n: round(ms, 2) for n, ms in curve.items()} for name, curve in curves}
    logger.info(
        "C2T: measured for %.1f s what a step takes, in ms: verification, by rows: %s, for each "
        "request %.2f and 1000 tokens of context %.2f; a draft layer, by requests: %s",
        seconds,
        told["verify"],
        cost.request,
        cost.context(1000),
        told["layer"],
    )


def _dummy_batch(worker: Any, requests: int, length: int) -> Any:
    """Return a batch of B ``requests``, all in the padding row, with so many tokens of context."""
    length = min(length, worker.target_worker.model_runner.model_config.context_len // 2)
    return dummy_batch(worker, [0] * requests, [length] * requests)

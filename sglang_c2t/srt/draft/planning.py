"""Runs the planner of a server: it gets a plan before each step and learns its outcome.

    begin    the plan of the next step, from the outcomes that have arrived
    finish   the step is verified, and its outcome starts on its way to the host

The planner learns a step's record when a later step begins. On a CPU that is the next step. On a
GPU, where the host runs ahead of the device, it is the one after. Nothing here waits. Of
tensor-parallel ranks the first one plans, and sends the others four integers. If the planner
raises, all ranks verify full drafts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_c2t.plan.cost import next_bucket
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord, StepTimes
from sglang_c2t.plan.survival import Numbers, as_probabilities
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.draft.selection import Selector, mask_of
from sglang_c2t.srt.draft.state_file import EVERY_IF_ASKED, StateFile
from sglang_c2t.srt.verify.packing import HostSizes
from sglang_c2t.srt.verify.timing import Mark, timed_forward

logger = logging.getLogger(__name__)

T = TypeVar("T")

# B requests, D layers, d of them drafted, N rows of a full draft, T rows of the forward

#: Steps between two copies of the learnt values to the device.
REFRESH_EVERY = 16

#: Most steps whose records may be on their way; older ones are dropped.
LONGEST_LAG = 16

#: Kinds of steps, numbered equally on all ranks, and those that a planner may plan.
KINDS = tuple(StepKind)
OF_PLANNERS = frozenset(
    {StepKind.PLANNED, StepKind.UNIFORM, StepKind.EXPLORE, StepKind.UNMEASURED, StepKind.FIXED}
)


@dataclass
class Step:
    """One step: its plan, and measurements from draft and verification."""

    plan: StepPlan
    batch: int
    """B."""
    context: int
    """Tokens of context, over the whole batch."""
    start: Mark
    full: Collection[int] = ()
    """Requests that opted out, so that their full drafts are verified."""
    constrained: Collection[int] = ()
    """Requests whose sampling changes the target's distribution."""
    unmeasured: Collection[int] = ()
    """Requests whose first layer this gate has not scored; the planner skips them."""
    draft: list[Mark] = field(default_factory=list)
    verify: tuple[Mark, Mark] | None = None
    forwarded_rows: int = 0
    """T."""
    selected: Any = None
    """Data that the selector needs for the outcome."""
    outcome: HostSizes | None = None
    """[B, ...] on its way to the host; ``None`` if nothing was scored."""
    draft_input: Any = None
    """SGLang's draft input of a draft-free step."""
    ends_burst: bool = False
    """Whether draft extend reads all tokens of draft-free steps after this one."""
    extends: int = 0
    """Draft extends at the end of the burst."""
    accepted: HostSizes | None = None
    """[B] accepted tokens on their way to the host; ``None`` if the planner needs none."""
    forwards: int = 0
    """Target forwards of the server, up to and including this step's."""
    end: Mark | None = None
    """Begin of the next step; ``None`` if other work ran in between."""

    @property
    def draft_free(self) -> bool:
        """Whether the step verifies the roots only."""
        return self.plan.num_layers == 0

    def layers_begin(self) -> None:
        """Mark the start of the first draft forward; later calls do nothing."""
        if not self.draft:
            on_cuda = self.start.on_cuda
            self.draft = [Mark(on_cuda), Mark(on_cuda)]
            self.draft[0].set()

    def layers_end(self) -> None:
        """Mark the end of the last draft forward."""
        if self.draft:
            self.draft[1].set()

    @contextmanager
    def timing(self, target_worker: Any, verify_input: Any) -> Iterator[None]:
        """Time the forward of ``verify_input`` inside the block."""
        with timed_forward(target_worker, self.start.on_cuda) as marks:
            yield
        self.verify, self.forwarded_rows = marks, verify_input.forwarded_rows

    @property
    def arrived(self) -> bool:
        """Whether the outcome and the times can be read without waiting for the device."""
        outcome = all(on is None or on.arrived for on in (self.outcome, self.accepted))
        # The draft extends of draft-free steps follow the verification.
        ends = [*(self.verify or ()), *self.draft, *([self.end] if self.end else [])]
        return outcome and all(mark.passed for mark in ends)

    def times(self) -> StepTimes:
        """Return the step's times; it must be verified, and its marks passed."""
        assert self.verify is not None
        return StepTimes(
            self.forwarded_rows,
            self.verify[0].until(self.verify[1]),
            self.draft[0].until(self.draft[1]) if self.draft else 0.0,
            None if self.end is None else self.start.until(self.end),
            self.extends,
        )


class Planning:
    """Plans the steps of one server.

    Args:
        planner: Makes the plans; of several ranks that share requests only the first one's is used.
        selector: Distributes the row budget on the device; ``None``: the policy's gate decides.
        tiers: Returns the row counts of the target's CUDA graphs; ``None``: all are equally good.
        width: N.
        device: Device of the drafts.
        forwards: Counts the forwards of the target.
        state_file: Called with the planner; returns the file of its state.
        agree: Makes a few integers equal on all ranks; ``None`` on one rank.
        failed: Called with the planner's exception. ``None``: re-raise.
    """

    selector: Any
    """A :class:`Selector`; ``None`` if a gate decides."""

    def __init__(
        self,
        planner: Any,
        selector: Selector | None,
        *,
        tiers: Callable[[], Tiers | None],
        width: int,
        device: torch.device | str,
        forwards: Callable[[], int] = lambda: 0,
        state_file: Callable[[Any], StateFile | None] | None = None,
        agree: Callable[[list[int]], list[int]] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self.planner, self.selector = planner, selector
        self.state_file = None if state_file is None else state_file(planner)
        self.agree = agree or (lambda numbers: numbers)
        self._tiers, self._width, self._forwards = tiers, width, forwards
        self._on_cuda = torch.device(device).type == "cuda"
        self._failed = failed
        self.strange = 0
        """Drafts whose confidence was no probability."""
        self._last: Step | None = None
        """The last verified step, until the next one begins."""
        self._finished: deque[Step] = deque(maxlen=LONGEST_LAG)
        self._row_counts: dict[int, Sequence[int]] = {}
        self._learnt = [0, 0]
        """Steps learnt from free requests, and from constrained ones."""

    @property
    def plans(self) -> bool:
        """Whether the planner plans, instead of a gate."""
        return self.selector is not None

    def begin(
        self,
        batch: int,
        *,
        context: int = 0,
        full: Collection[int] = (),
        constrained: Collection[int] = (),
        unmeasured: Collection[int] = (),
        pending: bool = False,
        may_skip_drafts: bool = False,
        agreed_layers: Callable[[int], int] = lambda mine: mine,
    ) -> Step:
        """Plan the next step, of B requests.

        Args:
            batch: B.
            context: See :class:`Step`.
            full: See :class:`Step`.
            constrained: See :class:`Step`.
            unmeasured: See :class:`Step`.
            pending: Whether a request cannot draft, because a burst of draft-free steps goes on.
            may_skip_drafts: Whether such a burst may begin.
            agreed_layers: Returns the number of layers for all ranks that forward together.
        """
        start = Mark(self._on_cuda)
        start.set()
        if self._last is not None:
            # After an idle time all requests come from another server or a prefill.
            followed = self._last.forwards == self._forwards() and len(unmeasured) < batch
            self._last.end = start if followed else None
            self._finished.append(self._last)
            self._last = None
        view = self._view(batch, context, full, constrained, may_skip_drafts)
        if pending:
            plan = draft_free_plan(batch, self.planner.topk)
            goes_on = self._burst_goes_on(view)
        else:
            plan, goes_on = self._plan(view), True
            plan = self._with_layers(plan, agreed_layers(plan.num_layers), batch)
        facts = batch, context, start, full, constrained, unmeasured
        return Step(plan, *facts, ends_burst=not goes_on)

    def warm_up_step(self, batch: int, *, layers: int, rows: int, context: int) -> Step:
        """Return a step of dummy requests, learnt only by :meth:`learn_warm_up`."""
        start = Mark(self._on_cuda)
        start.set()
        plan = StepPlan(StepKind.WARMUP, layers, self.planner.topk, rows)
        return Step(plan, batch, context, start)

    def finish(self, step: Step, verify_input: Any, accept_lens: Tensor) -> None:
        """Finish a verified ``step``: ``accept_lens`` [B] tokens accepted, bonus included."""
        step.forwards = self._forwards()
        if step.plan.kind is StepKind.WARMUP:
            return
        scored = step.plan.kind not in (StepKind.UNIFORM, StepKind.FIXED)
        if self.selector is not None and scored:
            step.outcome = HostSizes(self.selector.outcome(step, verify_input, accept_lens))
        if step.plan.expected_drafts is not None:
            step.accepted = HostSizes(accept_lens)
        self._last = step

    def learn_warm_up(self, step: Step) -> None:
        """Wait for a step of dummy requests, and learn its times."""
        if self._on_cuda:
            torch.cuda.synchronize()
        record = StepRecord(step.plan, step.batch, step.context, times=step.times())
        self._or_else(None, lambda: self.planner.learn(record))

    def warm_up(self, batches: Iterable[int]) -> None:
        """Compile the kernels outside of graphs, for batches of these sizes."""
        if self.selector is not None:
            self.selector.warm_up(batches)

    # -- the plan ----------------------------------------------------------------------------

    def _view(
        self,
        batch: int,
        context: int,
        full: Collection[int],
        constrained: Collection[int],
        may_skip_drafts: bool,
    ) -> BatchView:
        """Return the batch for the planner. Requests that opted out need all layers, and more rows
        than a uniform step gives them. Constrained requests, whose drafts often fail, need fewer
        rows than a uniform step gives them.
        """
        return BatchView(
            batch,
            self._rows(batch),
            range(self.planner.max_depth if full else 1, self.planner.max_depth + 1),
            context,
            len(constrained),
            allows_uniform=not full and not constrained,
            allows_draft_free=may_skip_drafts and not full,
        )

    def _plan(self, view: BatchView) -> StepPlan:
        """Return the first rank's plan."""
        most = view.depths[-1], self.planner.topk, view.batch_size * self._width
        plan = StepPlan(StepKind.FALLBACK, *most)
        plan = self._or_else(plan, lambda: self._checked(self._learnt_and_planned(view), view))
        if self.selector is None:
            return plan
        chosen = -1 if plan.full_draft_of is None else plan.full_draft_of
        mine = [KINDS.index(plan.kind), plan.num_layers, plan.row_budget, chosen]
        if (first := self.agree(mine)) == mine:
            return plan
        kind, layers, rows, chosen = first
        return replace(
            plan,
            kind=KINDS[kind],
            num_layers=layers,
            row_budget=rows,
            full_draft_of=None if chosen < 0 else chosen,
            expected_drafts=None,
        )

    def _learnt_and_planned(self, view: BatchView) -> StepPlan:
        """Learn what has arrived, then return the plan. Raises what the planner raises."""
        self._learn_arrived()
        plan: StepPlan = self.planner.plan(view)
        return plan

    def _burst_goes_on(self, view: BatchView) -> bool:
        """Return the first rank's answer, whether another draft-free step follows this one. Gates
        and planners that raise end the burst.
        """

        def asked() -> bool:
            self._learn_arrived()
            answer: bool = self.planner.stays_draft_free(view)
            return answer

        mine = self._or_else(False, asked)
        return mine if self.selector is None else bool(self.agree([int(mine)])[0])

    def _learn_arrived(self) -> None:
        while self._finished and self._finished[0].arrived:
            self._learn(self._finished.popleft())
        if self.state_file is not None:
            self.state_file.save_now_and_then()

    def _checked(self, plan: StepPlan, view: BatchView) -> StepPlan:
        """Return the ``plan``; ValueError if no step can follow it. Rows may be too many or too
        few, except in a uniform step.
        """
        batch, uniform, chosen = view.batch_size, plan.kind is StepKind.UNIFORM, plan.full_draft_of
        if (
            plan.kind not in OF_PLANNERS
            or not (plan.num_layers in view.depths or (uniform and self._skips(plan, view)))
            or not -(2**31) < plan.row_budget < 2**31
            or (uniform and plan.row_budget != batch * self.planner.full_rows(plan.num_layers))
            or not (chosen is None or 0 <= chosen < batch)
        ):
            raise ValueError(f"a planner planned {plan} for {batch} requests")
        return (
            plan if type(plan.row_budget) is int else replace(plan, row_budget=int(plan.row_budget))
        )

    def _skips(self, plan: StepPlan, view: BatchView) -> bool:
        return plan.num_layers == 0 and view.allows_draft_free

    def _with_layers(self, plan: StepPlan, layers: int, batch: int) -> StepPlan:
        """Return the ``plan`` with the number of layers that all ranks draft, for which nothing was
        forecast.
        """
        if layers == plan.num_layers:
            return plan
        most = batch * self.planner.full_rows(layers)
        rows = most if plan.kind is StepKind.UNIFORM else min(plan.row_budget, most)
        return replace(plan, num_layers=layers, row_budget=rows, expected_drafts=None)

    def _or_else(self, otherwise: T, ask: Callable[[], T]) -> T:
        """Return the result of ``ask``; ``otherwise`` if the planner raises."""
        try:
            return ask()
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
            return otherwise

    # -- learning ----------------------------------------------------------------------------

    def _learn(self, step: Step) -> None:
        """Learn from a step whose record has arrived."""
        record = StepRecord(
            step.plan,
            step.batch,
            step.context,
            num_correct=None if step.accepted is None else step.accepted.wait().numpy() - 1,
            times=None if step.verify is None else step.times(),
        )
        if step.outcome is not None and self.selector is not None:
            numbers = step.outcome.wait().numpy()
            outcome, teaches = self._sane(self.selector, numbers, step.plan)
            teaches[list(step.unmeasured)] = False
            mask = mask_of(step.constrained, step.batch) if step.constrained else None
            record = replace(
                record,
                outcome=tuple(values[teaches] for values in outcome) if teaches.any() else (),
                constrained=None if mask is None else mask[teaches],
            )
        self.planner.learn(record)
        if self.selector is not None:
            for constrained in (False, True):
                if record.of_class(constrained=constrained):
                    self._learnt[constrained] += 1
                    if self._learnt[constrained] % REFRESH_EVERY == 0:
                        self.selector.refresh(constrained=constrained)

    def _sane(
        self, selector: Selector, numbers: Numbers, plan: StepPlan
    ) -> tuple[list[Numbers], NDArray[np.bool_]]:
        """The outcome with confidences that are probabilities, and [B] whose were that before."""
        outcome, at = list(selector.unpacked(numbers, plan)), selector.confidence_at
        probabilities, strange = as_probabilities(outcome[at])
        if strange.any():
            if self.strange == 0:
                logger.warning(
                    "C2T: the draft or its gate gave confidences that are no probabilities, and "
                    "drafts with such ones teach nothing: %s",
                    outcome[at][strange][:3].tolist(),
                )
            self.strange += int(strange.sum())
        outcome[at] = probabilities
        return outcome, ~np.asarray(strange.reshape(len(strange), -1).any(axis=1))

    # -- reports -----------------------------------------------------------------------------

    def report(self, most_requests: int) -> dict[str, Any] | None:
        """Return what the planner has learnt, and its plans for up to twice ``most_requests``.
        ``None`` if the planner raises.
        """
        return self._or_else(None, lambda: self._report(most_requests))

    def _report(self, most_requests: int) -> dict[str, Any]:
        if self.state_file is not None:
            self.state_file.save_now_and_then(EVERY_IF_ASKED)
        batches = {1 << n for n in range((2 * most_requests).bit_length())} | {most_requests}
        row_counts = {batch: self._rows(batch) for batch in sorted(batches)}
        plans: list[Any] = self.planner.best_plan_by_batch_size(row_counts)
        report: dict[str, Any] = self.planner.report()
        return report | {"best_plan_by_batch_size": plans, "strange_confidences": self.strange}

    def row_counts(self, most_requests: int) -> Sequence[int]:
        """Possible row counts of verifications of up to ``most_requests``, increasing."""
        tiers, most = self._tiers(), most_requests * self._width
        # Graphs may be captured for more requests than are admitted.
        return range(1, most + 1) if tiers is None else [t for t in tiers.rows if t <= most]

    def _rows(self, batch: int) -> Sequence[int]:
        """Return row counts to choose from: tiers that can hold the batch."""
        if batch not in self._row_counts:
            most, tiers = batch * self._width, self._tiers()
            fitting = [t for t in tiers.rows if tiers.pick(t, batch) == t] if tiers else []
            # Larger batches run eagerly.
            self._row_counts[batch] = fitting or geometric_sizes(batch, most)
        return self._row_counts[batch]


def draft_free_plan(batch: int, topk: int) -> StepPlan:
    """Return the plan of a step that verifies the roots of B requests only."""
    return StepPlan(StepKind.UNIFORM, 0, topk, batch)


def geometric_sizes(least: int, most: int) -> list[int]:
    """Return sizes from ``least`` to ``most``, both included, with equal ratios. They are a few per
    octave, each with its own cost, so most are where a row costs most.
    """
    found = [least]
    while (size := next_bucket(found[-1])) < most:
        found.append(size)
    return sorted({*found, most})

"""The planner beside a server's steps: asked before each, told what became of it.

    begin     layers to draft, from what is known of the batch
    settle    rows to verify, once drafts are made
    verified  which drafts survived, on its way to the host
    timing    what the parts of a step took

On a GPU the host runs ahead of the device, so that a step is planned from outcomes that have
arrived, a step or two old, and nothing here waits; the device then ranks the drafts it really has.
On a CPU both are one, and the plan sees the drafts themselves. Of tensor-parallel ranks one plans,
and the others are told. Where the planner raises, the step verifies full drafts, on all ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_c2t.draft.slots import FirstLayer
from sglang_c2t.draft.survivals import DeviceSurvival
from sglang_c2t.kernels.budget import chains_within
from sglang_c2t.kernels.outcome import outcome_of_chains
from sglang_c2t.plan.cost import priced_behind
from sglang_c2t.plan.plan import Plan
from sglang_c2t.plan.planner import Choice, Planner
from sglang_c2t.plan.survival import Array, Numbers, as_probabilities
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt.draft.outcomes import Outcome, mask_of
from sglang_c2t.srt.draft.state_file import EVERY_IF_ASKED, StateFile
from sglang_c2t.srt.hooks.step_metrics import PlannedStep
from sglang_c2t.srt.verify.packed import PackedVerifyInput
from sglang_c2t.srt.verify.packing import HostSizes
from sglang_c2t.srt.verify.timing import Mark, timed_forward

logger = logging.getLogger(__name__)

T = TypeVar("T")

# B requests, D layers, d of them drafted, N rows of a full draft, T rows of the forward

#: Steps between two copies of what was learnt to the device.
REFRESH_EVERY = 16

#: Steps whose outcomes may be on their way; more are not remembered.
LONGEST_LAG = 16

#: Why a step does what it does, numbered alike on all ranks.
REASONS = ("plan", "unknown", "explore", "rehearsed", "plain", "failed")


@dataclass
class _Step:
    """A step in progress, or whose times are on their way."""

    choice: Choice
    plan: Plan
    batch: int
    context: int
    start: Mark
    draft: list[Mark] = field(default_factory=list)
    verify: tuple[Mark, Mark] | None = None
    forwarded: int = 0

    def times(self) -> dict[str, Any]:
        """What the cost of steps is learnt from; it has verified, and all its marks are passed."""
        assert self.verify is not None
        return {
            "rows": self.forwarded,
            "batch": self.batch,
            "context": self.context,
            "verify_ms": self.verify[0].until(self.verify[1]),
            "draft_ms": self.draft[0].until(self.draft[1]) if self.draft else 0.0,
        }


class Planning:
    """Plans the steps of one server.

    Args:
        planner: What decides; only rank 0's is asked.
        tiers: Gives the row counts of the target's CUDA graphs; ``None``: any is as good.
        width: N.
        slots: Rows of SGLang's request table.
        device: Where drafts are.
        state_file: Called with the planner, gives the file that keeps what it learns.
        agree: Makes a few integers equal on all ranks; ``None`` on one rank.
        failed: Called with what the planner raised. ``None``: it is raised on.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        tiers: Callable[[], Tiers | None],
        width: int,
        slots: int,
        device: torch.device | str,
        state_file: Callable[[Planner], StateFile | None] | None = None,
        agree: Callable[[list[int]], list[int]] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self.planner = planner
        self._failed = failed
        self.state_file = None if state_file is None else state_file(planner)
        self._tiers, self._width = tiers, width
        self.depths: Sequence[int] | None = None
        """Numbers of layers that can be drafted; ``None``: any."""
        self.widths: Collection[int] | None = None
        """Widths of drafts that can be; ``None``: any that the planner knows."""
        self.unmeasured: Collection[int] = ()
        """Requests of the step in progress of whose first draft nothing is known: what becomes of
        their drafts says nothing of a confidence."""
        self._constrained: Collection[int] = ()
        """Requests of the step in progress that teach only what concerns their like."""
        self.fell_back = False
        """Whether the planner failed in the step in progress, so that drafts stay whole."""
        self.strange = 0
        """Drafts whose confidence was no probability."""
        self.agree = agree or (lambda numbers: numbers)
        self._rehearsed: Choice | None = None
        """What a step does that serves nobody; ``None``: it serves."""
        self._on_cuda = torch.device(device).type == "cuda"
        self._acceptances = planner.free, planner.constrained
        self._survival, self._of_constrained = (
            DeviceSurvival(of.survival, device) for of in self._acceptances
        )
        layers = width - 1
        # Of a step, where CUDA graphs can write them.
        self._confidences = torch.ones((slots, layers), device=device)
        self._survivals = torch.ones((slots, layers), device=device)
        self._outcomes: deque[Outcome] = deque(maxlen=LONGEST_LAG)
        self._times: deque[tuple[_Step, Mark]] = deque(maxlen=LONGEST_LAG)
        """Steps, and when the next one started."""
        self._step: _Step | None = None
        self._known_first = np.full(1, 0.5)
        self._known_constrained: Numbers | None = None
        """[S] bool: which of these are of constrained requests; ``None``: none."""
        self._learnt = [0, 0]
        """Steps that free requests were learnt from, and constrained ones."""

    def warm_up(self, batches: Iterable[int]) -> None:
        """Compile what is launched outside of graphs, for batches of these sizes."""
        for batch in batches:
            whole = torch.zeros(batch, dtype=torch.bool, device=self._survivals.device)
            for chosen in (None, whole):
                chains_within(self._survivals[:batch], 0, self._width, chosen)
            self._with_constrained(self._survivals[:batch], [0])
            ones = whole.int() + 1
            outcome_of_chains(self._confidences[:batch], ones, ones)
            self.drafted([self._survivals[:batch, 0].clone()])  # without a graph

    def begin(
        self,
        batch: int,
        first: Callable[[], FirstLayer],
        *,
        context: int = 0,
        plain: bool = False,
        constrained: Collection[int] = (),
    ) -> Choice:
        """Layers to draft in this step; ``first`` gives what is known of its first drafts,
        ``context`` is how many tokens stand before all of them, ``plain`` says whether it may
        do without a gate, and ``constrained`` which of its requests have a target that is not the
        model's own.
        """
        start = Mark(self._on_cuda)
        start.set()
        if self._step is not None:
            self._times.append((self._step, start))
        self.fell_back, self._constrained = False, constrained
        # A plain step would verify as many drafts of requests whose drafts fail.
        plain = plain and not constrained
        whole_drafts = Choice(self._full_drafts(batch), "failed")
        choice = self._or_else(
            whole_drafts, lambda: self._decide(batch, first, context=context, plain=plain)
        )
        plan, whole = choice.plan, -1 if choice.whole is None else choice.whole
        reason, width, layers, rows, whole = self.agree(
            [REASONS.index(choice.reason), plan.width, plan.layers, plan.rows, whole]
        )
        plan = plan._replace(width=width, layers=layers, rows=rows)
        choice = Choice(plan, REASONS[reason], None if whole < 0 else whole)
        self.fell_back = choice.reason == "failed"
        self._step = _Step(choice, plan, batch, context, start)
        return choice

    def _decide(
        self, batch: int, first: Callable[[], FirstLayer], *, context: int, plain: bool
    ) -> Choice:
        """The planner's choice for this step. Raises what the planner raises, and ValueError for a
        choice that is no step.
        """
        self._learn()
        if self._rehearsed is not None:
            return self._rehearsed
        choice = self.planner.plain_step(batch) if plain else None
        if choice is None:
            if not self._on_cuda:
                self._known_first = self._first(first())
                self._known_constrained = self._mask_of_constrained(batch)
            choice = self.planner.choose(
                self._known_first, batch, self._rows(batch), self.depths, context=context,
                widths=self.widths, plain=plain, constrained=self._known_constrained,
            )  # fmt: skip
        return self._checked(choice, batch)

    def _checked(self, choice: Choice, batch: int) -> Choice:
        """The ``choice``; ValueError where no step can be made so. Rows may be too many or too few,
        but for a plain step.
        """
        plan, whole = choice.plan, choice.whole
        plan = plan._replace(rows=int(plan.rows))
        if (
            choice.reason not in REASONS
            or plan.layers not in (self.depths or range(1, self.planner.max_depth + 1))
            or plan.width not in (self.widths or self.planner.widths)
            or not (choice.reason != "plain" or batch <= plan.rows <= batch * self._width)
            or not (whole is None or 0 <= whole < batch)
        ):
            raise ValueError(f"a planner chose {choice} for {batch} requests")
        return choice._replace(plan=plan)

    def _full_drafts(self, batch: int) -> Plan:
        """The plan that cuts nothing."""
        layers = max(self.depths or [self.planner.max_depth])
        return Plan(layers, batch * self._width, float(batch), 1.0, self._widest)

    @property
    def _widest(self) -> int:
        return max(self.widths or self.planner.widths)

    def _or_else(self, otherwise: T, ask: Callable[[], T]) -> T:
        """What a planner says if it is asked; ``otherwise``, and the step falls back, where it
        raises.
        """
        try:
            return ask()
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
            self.fell_back = True
            return otherwise

    @property
    def told(self) -> PlannedStep | None:
        """What metrics say of the step in progress."""
        if self._step is None:
            return None
        planner = self.planner
        return PlannedStep(
            self._step.choice.reason,
            self._step.plan.layers,
            self._step.plan.width,
            planner.predicted_ms / 1e3,
            planner.measured_ms / 1e3,
        )

    def draft(self, layers: int) -> None:
        """Other ranks make the step in progress draft so many layers."""
        step = self._now
        most = step.batch * self.planner.full_rows(layers, step.plan.width)
        step.plan = step.plan._replace(layers=layers, rows=min(step.plan.rows, most))

    def whole_drafts(self) -> Plan:
        """Somebody wants all of a draft: the step in progress drafts as much as any can."""
        step, planner = self._now, self.planner
        step.plan = step.plan._replace(layers=planner.max_depth, width=planner.widest)
        return step.plan

    def interrupted(self) -> None:
        """What comes next is no step like the others: nobody knows when this one ended."""
        self._step = None

    @property
    def plain(self) -> bool:
        """Whether the step in progress verifies every draft alike, and asks no gate."""
        return self._step is not None and self._step.choice.reason == "plain"

    def rehearse(self, plan: Plan, run: Callable[[], object], *, learn: bool) -> None:
        """Have ``run()`` make a step of ``plan`` that serves nobody. What its drafts became means
        nothing; what it took is waited for, and learnt if so told.
        """
        self._rehearsed = Choice(plan, "rehearsed")
        try:
            run()
            step = self._step
            assert step is not None, "rehearsed without a step"
            if self._on_cuda:
                torch.cuda.synchronize()
            if learn:
                self.planner.cost.observe(layers=plan.layers, width=plan.width, **step.times())
        finally:
            self._rehearsed = self._step = None
            self._outcomes.clear()

    def drafted(self, confidences: Sequence[Tensor]) -> None:
        """The confidences [B] of each drafted layer. May be captured in a CUDA graph."""
        first, *more = confidences
        drafted = torch.stack((first, *more), dim=1) if more else first[:, None]
        here = slice(len(first)), slice(len(confidences))
        self._survival.of_chains(drafted, out=self._survivals[here], kept=self._confidences[here])

    def layers_begin(self) -> None:
        """The first draft forward of a step starts; of several calls the first counts."""
        if self._step is not None and not self._step.draft:
            self._step.draft = [Mark(self._on_cuda), Mark(self._on_cuda)]
            self._step.draft[0].set()

    def layers_end(self) -> None:
        """The last draft forward has ended."""
        if self._step is not None and self._step.draft:
            self._step.draft[1].set()

    def settle(
        self,
        layers: int,
        whole: Collection[int] = (),
        *,
        agreed: Callable[[Tensor], Tensor] = lambda mine: mine,
    ) -> tuple[Tensor, Tensor, int]:
        """Chains cut to what is verified, as :func:`chains_within` has them, and the rows of all.

        Args:
            layers: d, drafted.
            whole: Which of the B requests' drafts are verified to the end, come what may.
            agreed: Makes a tensor equal on all ranks.
        """
        batch = self._now.batch
        drafts, mask, total = self._share(
            layers,
            whole,
            lambda: as_probabilities(self._confidences[:batch, :layers].numpy())[0],
        )
        survivals = self._survivals[:batch]
        if self._constrained:
            survivals = self._with_constrained(survivals, self._constrained)
        survivals = agreed(survivals)
        lens, links = chains_within(survivals, drafts, self._width, mask, layers=layers)
        return lens, links, total

    def _with_constrained(self, survivals: Tensor, constrained: Collection[int]) -> Tensor:
        """``survivals`` [B, D], those of ``constrained`` requests by what became of their like."""
        batch = len(survivals)
        confidences, theirs = self._confidences[:batch], torch.empty_like(survivals)
        self._of_constrained.of_chains(confidences, out=theirs, kept=confidences)
        return torch.where(self._mask(batch, constrained)[:, None], theirs, survivals)

    def alike(self) -> tuple[Tensor, int]:
        """Rows of each request [B] int32, root included, and of all of them in a plain step."""
        batch, rows = self._now.batch, self._now.plan.rows
        each = torch.full(
            (batch,), self.rows_each, dtype=torch.int32, device=self._survivals.device
        )
        return each, rows

    @property
    def layers(self) -> int:
        """D of the step in progress."""
        return self._now.plan.layers

    @property
    def width(self) -> int:
        """W of the step in progress."""
        return self._now.plan.width

    @property
    def rows_each(self) -> int:
        """Rows of each request in a plain step, root included."""
        return self._now.plan.rows // self._now.batch

    @property
    def _now(self) -> _Step:
        assert self._step is not None, "asked before it began"
        return self._step

    def _share(
        self, layers: int, whole: Collection[int], seen: Callable[[], Array]
    ) -> tuple[int, Tensor | None, int]:
        """Drafts that are verified of the requests that are not whole, [B] bool which are, if any
        is, and the rows of all.

        Args:
            layers: d, drafted.
            whole: Which of the B requests want to be.
            seen: Gives the drafts' confidences, where the host can have them for nothing.
        """
        step = self._now
        batch, width = step.batch, step.plan.width
        each = self.planner.full_rows(layers, width) - 1
        if not self._on_cuda and self._rehearsed is None:
            rows = batch * self._width
            if not self.fell_back:
                rows = self._or_else(rows, lambda: self._settled(seen(), width))
            (rows,) = self.agree([rows])
            step.plan = step.plan._replace(rows=rows)
        step.plan = step.plan._replace(layers=layers)
        whole = {*whole} if step.choice.whole is None else {*whole, step.choice.whole}
        wanted = step.plan.rows - batch - len(whole) * each
        drafts = min(max(wanted, 0), (batch - len(whole)) * each)
        mask = self._mask(batch, whole) if whole else None
        return drafts, mask, batch + drafts + len(whole) * each

    def _settled(self, confidences: Array, width: int) -> int:
        """Rows of all, as the planner wants them of drafts with these ``confidences``."""
        batch = self._now.batch
        plan = self.planner.settle(
            confidences, self._rows(batch), width, self._mask_of_constrained(batch)
        )
        return int(plan.rows)

    def _mask_of_constrained(self, batch: int) -> Numbers | None:
        """[B] bool on the host; ``None``: none is."""
        return mask_of(self._constrained, batch) if self._constrained else None

    def _mask(self, batch: int, chosen: Collection[int]) -> Tensor:
        """[B] bool where drafts are: true at the ``chosen``. From the host, so that the total is
        that of the device.
        """
        mask = torch.from_numpy(mask_of(chosen, batch))
        if self._on_cuda:  # a copy from pageable memory would wait for the device
            mask = mask.pin_memory()
        return mask.to(self._survivals.device, non_blocking=True)

    @contextmanager
    def timing(self, target_worker: Any, verify_input: PackedVerifyInput) -> Iterator[None]:
        """Time the forward of ``verify_input`` inside the block."""
        with timed_forward(target_worker, self._on_cuda) as marks:
            yield
        if self._step is not None:
            self._step.verify = marks
            self._step.forwarded = verify_input.forwarded_rows

    def verified(self, verify_input: PackedVerifyInput, accept_lens: Tensor) -> None:
        """The outcome of a step: ``accept_lens`` [B] tokens accepted, bonus included."""
        if self.plain:  # nobody has said how sure its drafts were
            return
        num_rows, layers = verify_input.num_rows, self._now.plan.layers
        drafted = self._confidences[: len(num_rows), :layers]
        self._send(outcome_of_chains(drafted, num_rows, accept_lens))

    def _send(self, outcome: Tensor) -> None:
        """The ``outcome`` [B, ...] of the step in progress starts on its way to the host."""
        self._outcomes.append(
            Outcome(HostSizes(outcome), self._now.plan, self.unmeasured, self._constrained)
        )

    def _learn(self) -> None:
        """Learn from what has arrived since."""
        while self._outcomes and self._outcomes[0].sizes.arrived:
            outcome = self._outcomes.popleft()
            for constrained in self._learn_outcome(outcome.sizes.wait().numpy(), outcome):
                self._learnt[constrained] += 1
                if self._learnt[constrained] % REFRESH_EVERY == 0:
                    twin = self._of_constrained if constrained else self._survival
                    twin.refresh(self._acceptances[constrained].survival)
        while self._times and self._times[0][1].passed:
            self._learn_time(*self._times.popleft())
        if self.state_file is not None:
            self.state_file.save_now_and_then()

    def _sane(self, confidences: Numbers) -> tuple[Array, NDArray[np.bool_]]:
        """``confidences`` [B, ...] of drafts that were verified as probabilities, and [B] whose
        were that before.
        """
        probabilities, strange = as_probabilities(confidences)
        if strange.any():
            if self.strange == 0:
                logger.warning(
                    "C2T: the draft or its gate gave confidences that are no probabilities, and "
                    "drafts with such ones teach nothing: %s",
                    confidences[strange][:3].tolist(),
                )
            self.strange += int(strange.sum())
        of_request = strange.reshape(len(strange), -1).any(axis=1)
        return probabilities, ~np.asarray(of_request, dtype=np.bool_)

    def _first(self, layer: FirstLayer) -> Array:
        """What is known of first drafts, as :meth:`Planner.choose` takes it."""
        return as_probabilities(layer.confidence[0].numpy())[0]

    def _learn_outcome(self, numbers: Numbers, outcome: Outcome) -> list[bool]:
        """Learn from the ``numbers`` [B, ...] that an ``outcome`` brought; returns for each class
        of requests that taught whether it is the constrained one.
        """
        layers = outcome.plan.layers
        confidences, drafts, correct = np.split(numbers, [layers, layers + 1], axis=1)
        confidences, sane = self._sane(confidences)
        self._knows(confidences[:, 0], outcome)
        learnt = []
        for rows, constrained in outcome.classes(sane):
            counts = drafts[rows, 0], correct[rows, 0]
            self.planner.learn_drafts(confidences[rows], *counts, constrained=constrained)
            learnt.append(constrained)
        return learnt

    def _knows(self, first: Array, outcome: Outcome) -> None:
        """The ``first`` drafts [B, ...] of an ``outcome`` stand for those to come."""
        self._known_first = first
        constrained = outcome.constrained
        self._known_constrained = mask_of(constrained, len(first)) if constrained else None

    def _learn_time(self, step: _Step, end: Mark) -> None:
        if step.verify is None:
            return
        self.planner.learn_time(
            step.plan,
            step_ms=step.start.until(end),
            plain=step.choice.reason == "plain",
            **step.times(),
        )

    def report(self, most_requests: int) -> dict[str, Any] | None:
        """What the planner has learnt, and what loads up to twice ``most_requests`` would bring;
        ``None`` where it raises.
        """
        return self._or_else(None, lambda: self._report(most_requests))

    def _report(self, most_requests: int) -> dict[str, Any]:
        if self.state_file is not None:
            self.state_file.save_now_and_then(EVERY_IF_ASKED)
        batches = {1 << n for n in range((2 * most_requests).bit_length())} | {most_requests}
        outlook = self.planner.outlook({batch: self._rows(batch) for batch in sorted(batches)})
        told = {"outlook": outlook, "strange_confidences": self.strange}
        return self.planner.report() | told

    def row_counts(self, most_requests: int) -> Sequence[int]:
        """Row counts that verifications of up to ``most_requests`` may have, rising."""
        tiers, most = self._tiers(), most_requests * self._width
        # Graphs may be captured for more requests than are admitted.
        return range(1, most + 1) if tiers is None else [t for t in tiers.rows if t <= most]

    def _rows(self, batch: int) -> list[int]:
        """Row counts to choose from: tiers that can hold the batch."""
        most = batch * self._width
        tiers = self._tiers()
        if tiers is None:
            return every_few(batch, most)
        fitting = [t for t in tiers.rows if tiers.pick(t, batch) == t]
        # Beyond the largest graph all is eager.
        return fitting or every_few(batch, most)


def every_few(least: int, most: int) -> list[int]:
    """Numbers from ``least`` to ``most``, both among them, and between these the ones that have a
    price of their own: a few of each octave, so that most are where a row costs most.
    """
    found = [least]
    while (size := priced_behind(found[-1])) < most:
        found.append(size)
    return sorted({*found, most})

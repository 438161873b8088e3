"""Policies for tests, loaded into a server with ``--c2t-policy``; one server, many gates."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from eval.baselines import MCSDInputs
from sglang_c2t.config import C2TConfig
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord
from sglang_c2t.plan.survival import Survival
from sglang_c2t.plan.trees import TreePlanner
from sglang_c2t.policies import ChainPolicy, DraftLayer, TreePolicy, build_policy, build_tree_policy
from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.gated_tree import PlannedTree

MODES = ("c2t", "full", "none", "random")

#: As ``random``, but raises now and then, and not on all ranks at once.
FAILS = "fails"


def _fail(mode: str, generator: torch.Generator) -> None:
    if mode == FAILS and torch.rand((), generator=generator) < 0.3:
        raise RuntimeError("this policy was told to fail")


def _config_of(mode: str) -> C2TConfig:
    """Configuration of a mode that names a policy."""
    return C2TConfig("c2t") if mode == "c2t" else C2TConfig.from_json(mode, source="control")


@dataclass
class Switchable:
    """Reads from the file ``control`` which gate to be, before every layer.

    One of ``MODES``, or the JSON of a :class:`C2TConfig` whose policy to be. ``random`` keeps
    each token with probability 0.7, so that lengths differ between the requests of a batch
    and from step to step. Its seed is the process's own, so that tensor-parallel ranks would
    decide differently if each decided for itself.
    """

    control: str
    measured: list[str] = field(default_factory=list)
    name: ClassVar[str] = "switchable"
    _generator: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(os.getpid())
    )
    _policies: dict[str, ChainPolicy] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """Whatever any of the gates to be needs."""
        return frozenset(self.measured)

    def measure(self, logits: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """Measure the inputs of the baselines among the gates."""
        inputs = MCSDInputs(hidden="hidden" in self.measured).measure(logits, hidden)
        return {name: values for name, values in inputs.items() if name in self.measured}

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool, as the current mode says."""
        mode = Path(self.control).read_text()
        if mode in ("random", FAILS):
            _fail(mode, self._generator)
            return torch.rand(layer.alive.shape, generator=self._generator) < 0.7
        if mode in ("full", "none"):
            return torch.full_like(layer.alive, mode == "full")
        if mode not in self._policies:
            self._policies[mode] = build_policy(_config_of(mode))
        return self._policies[mode].keep(layer)


@dataclass
class SwitchableTree:
    """The same for trees: reads from the file ``control`` which policy to be.

    ``full`` is EAGLE-2, ``none`` keeps nothing, ``c2t`` is the default configuration, and
    ``random`` keeps a random share of each request's layer, seeded as above.
    """

    control: str
    measured: list[str] = field(default_factory=list)
    name: ClassVar[str] = "switchable-tree"
    _generator: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(os.getpid())
    )
    _shape: TreeShape | None = None
    _policies: dict[str, TreePolicy] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """Whatever any of the policies to be needs."""
        return frozenset(self.measured)

    def check(self, shape: TreeShape) -> None:
        """Keep the shape for the policies to be."""
        self._shape = shape

    def grow(self, layer: TreeLayer) -> Growth:
        """As the current mode says."""
        mode = Path(self.control).read_text()
        joint = layer.joint
        if mode in ("full", "none", "random", FAILS):
            _fail(mode, self._generator)
            drawn = torch.rand(joint.shape, generator=self._generator)
            share = torch.rand(len(joint), 1, 1, generator=self._generator)
            if mode in ("full", "none"):
                share = torch.full_like(share, mode == "full")
            key = joint.masked_fill(drawn >= share, -torch.inf)
            return Growth(key=key, expand=key)
        if mode not in self._policies:
            policy = build_tree_policy(_config_of(mode))
            assert self._shape is not None
            policy.check(self._shape)
            self._policies[mode] = policy
        return self._policies[mode].grow(layer)


#: Most steps of a burst of draft-free steps, even, and more than draft extend reads at once.
LONGEST_BURST = 10
SHORT = "short"


class _AnyPlan:
    """Draws plans of any layers and rows, half of them uniform, whatever they cost. All kinds come
    equally often, and so do bursts of draft-free steps.

    Where the file ``control`` holds :data:`FAILS`, about every fourth call of a method raises, in
    each rank others.
    """

    control = ""
    _random = random.Random(3)
    _failures = random.Random(os.getpid())

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kinds: list[tuple[bool, int]] = []
        self._more = 0  # draft-free steps

    def plan(self, batch: BatchView) -> StepPlan:
        """Draw a plan, with the same seed in each process."""
        self._perhaps_fail("plan")
        planner: Any = self
        if not self._kinds:
            every = itertools.product((False, True), range(planner.max_depth + 1))
            self._kinds = [kind for kind in every if kind != (False, 0)]
            self._random.shuffle(self._kinds)
        uniform, layers = self._kinds.pop()
        if layers == 0 and batch.allows_draft_free:
            self._more = self._random.randint(0, LONGEST_BURST - 1)
            return StepPlan(StepKind.UNIFORM, 0, planner.topk, batch.batch_size)
        layers = max(layers, batch.depths[0])
        requests, rows = batch.batch_size, batch.batch_size * planner.full_rows(layers)
        if uniform and batch.allows_uniform:
            return StepPlan(StepKind.UNIFORM, layers, planner.topk, rows)
        rows = self._random.randint(requests, rows)
        full = self._random.choice([None, self._random.randrange(requests)])
        return StepPlan(StepKind.PLANNED, layers, planner.topk, rows, full)

    def stays_draft_free(self, _batch: BatchView) -> bool:
        """Whether as many draft-free steps as drawn have not yet followed the first one."""
        self._perhaps_fail("stays_draft_free")
        self._more -= 1
        return self._more > 0

    def learn(self, record: StepRecord) -> None:
        """Learn as the stock planner does, or raise."""
        self._perhaps_fail("learn")
        super().learn(record)  # type: ignore[misc]

    def report(self) -> Any:
        """Report as the stock planner does, or raise."""
        self._perhaps_fail("report")
        return super().report()  # type: ignore[misc]

    def _perhaps_fail(self, method: str) -> None:
        if not self.control or Path(self.control).read_text() != FAILS:
            return
        if self._failures.random() < 1 / 4:
            raise ZeroDivisionError(f"{method} was told to fail")


class AnyPlan(_AnyPlan, Planner):
    """The planner of chains."""


class AnyPlanOfTrees(_AnyPlan, TreePlanner):
    """The planner of trees."""


@dataclass(frozen=True)
class AnyJoint(DyJoint):
    """The joint probability as a confidence, and a planner that draws plans."""

    control: str = ""
    name: ClassVar[str] = "any-joint"

    def planner(self, shape: TreeShape) -> AnyPlan:
        """Make a planner that has learnt nothing yet."""
        planner = AnyPlan(shape.num_steps, Survival(shape.num_steps))
        planner.control = self.control
        return planner


@dataclass(frozen=True)
class AnyTrees(PlannedTree):
    """The same for trees."""

    gate: DyJoint = field(default_factory=DyJoint)
    control: str = ""

    def planner(self, shape: TreeShape) -> AnyPlanOfTrees:
        """Make a planner that has learnt nothing yet."""
        planner = AnyPlanOfTrees(*shape)
        planner.control = self.control
        return planner


class Bursts(Planner):
    """Plans a full draft of each request after every :data:`LONGEST_BURST` draft-free steps, which
    are one burst, or bursts of two where the file ``control`` holds :data:`SHORT`.
    """

    control = ""

    def plan(self, batch: BatchView) -> StepPlan:
        """Plan the next step, of a burst or after it."""
        free = self._free(batch)
        layers = 0 if free else self.max_depth
        return StepPlan(StepKind.UNIFORM, layers, 1, batch.batch_size * (1 + layers))

    def stays_draft_free(self, batch: BatchView) -> bool:
        """Whether the burst goes on; see :meth:`plan`."""
        self._free(batch)
        more = self._steps % (LONGEST_BURST + 1) < LONGEST_BURST
        return more and Path(self.control).read_text() != SHORT

    def _free(self, batch: BatchView) -> bool:
        """Count a step, and return whether it drafts nothing."""
        self._steps += 1
        return self._steps % (LONGEST_BURST + 1) > 0 and batch.allows_draft_free


@dataclass(frozen=True)
class BurstsJoint(DyJoint):
    """The joint probability as a confidence, and bursts."""

    control: str = ""
    name: ClassVar[str] = "bursts-joint"

    def planner(self, shape: TreeShape) -> Bursts:
        """Make the planner."""
        planner = Bursts(shape.num_steps, Survival(shape.num_steps))
        planner.control = self.control
        return planner


class Priced(Planner):
    """Plans by fixed costs, so that two servers make the same plans."""

    def __init__(self, max_depth: int, survival: Survival) -> None:
        super().__init__(max_depth, survival)
        sizes = range(1, 65)  # all, or it would look for what is not known
        self.cost.restore(
            {
                "verify": {rows: 10.0 + 5.0 * rows for rows in sizes},
                "layer": dict.fromkeys(sizes, 1.0),
                "rest": dict.fromkeys(sizes, 1.0),
            }
        )

    def learn(self, record: StepRecord) -> None:
        """Whatever it took."""
        super().learn(replace(record, times=None))


@dataclass(frozen=True)
class PricedJoint(DyJoint):
    """The joint probability as a confidence, planned at fixed prices."""

    name: ClassVar[str] = "priced-joint"

    def planner(self, shape: TreeShape) -> Priced:
        """A planner that knows nothing yet of drafts."""
        return Priced(shape.num_steps, Survival(shape.num_steps))

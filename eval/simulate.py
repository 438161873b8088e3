"""SIMULATION of speculative serving: what plans would bring at loads and on machines we have not.

    python -m eval.simulate --machine h200 --batch 1 16 64 256 1024
    python -m eval.simulate --curves runs/planner.json          # what GET /c2t told under "planner"
    python -m eval.simulate --recording runs/tables/chains     # drafts that a server recorded

Time is not measured here: a step takes what a roofline or a cost curve says. Drafts are drawn from
acceptance by position, or those of a recording; the planner is the server's own, learning from
these steps as it does from real ones. A number of it belongs beside the word "simulated".

Drafts: a draft is accepted, if its parent is, with probability sigmoid(m_k + x), where x is how
easy request and token are and m_k makes acceptance by position what was asked for. The classifier
sees x with noise: the less, the better it ranks.

Legend: B requests, D layers, d of them drafted, T rows of a forward, S survival by position.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eval.gpu.models import SHAPES, Shape
from eval.gpu.roofline import Ceilings, forward
from eval.tables.markdown import row, rule
from sglang_c2t.checks import parse_json
from sglang_c2t.classifier.recording import read_recording
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.files import read_text
from sglang_c2t.offline.replay import Chains
from sglang_c2t.plan.cost import StepCost
from sglang_c2t.plan.plan import best_plan
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import BatchView, StepRecord, StepTimes
from sglang_c2t.plan.survival import Array, Numbers, OneSlope, Survival
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.policies import build_policy
from sglang_c2t.policies.base import Gate

#: Acceptance by position as published, drawn on where the source ends: vllm-project/vllm#52992
#: tells 71.2, 51.7 and 39.0 %.
POSITIONS = (0.712, 0.517, 0.390, 0.294, 0.222, 0.167, 0.126)

#: What large copies and products reach of a data sheet's figures.
REACHED = 0.8

#: Dense bfloat16 rate and bandwidth of the makers' data sheets.
DATA_SHEETS = {"h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12), "b200": (8.0e12, 2250e12)}

MACHINES = {
    name: Ceilings(name, REACHED * bandwidth, REACHED * rate)
    for name, (bandwidth, rate) in DATA_SHEETS.items()
}


class Drafts:
    """Chains of drafts that are accepted as often as ``positions`` say.

    Args:
        positions: S_k, falling: how often the k-th draft and all before it are accepted.
        spread: Standard deviation of x, in log odds.
        blindness: Of the noise with which the classifier sees x.
    """

    def __init__(
        self, positions: Sequence[float], *, spread: float = 2.0, blindness: float = 1.0
    ) -> None:
        falls = all(a > b for a, b in zip((1.0, *positions), (*positions, 0.0), strict=True))
        if not positions or not falls:
            raise ConfigError(f"acceptance by position must fall from below 1, got {positions}")
        self.spread, self.blindness = spread, blindness
        self.middles: list[float] = []
        ease = self._ease(np.random.default_rng(1), 20_000, len(positions))
        alive = np.ones(len(ease))
        for x, wanted in zip(ease.T, positions, strict=True):
            self.middles.append(_middle(x, alive, wanted))
            alive = alive * _sigmoid(self.middles[-1] + x)

    @property
    def layers(self) -> int:
        """D."""
        return len(self.middles)

    def draw(self, rng: np.random.Generator, batch: int) -> tuple[Array, Array]:
        """Confidences and true survivals of a batch, each [B, D]."""
        ease = self._ease(rng, batch, len(self.middles))
        seen = ease + rng.normal(0.0, self.blindness, ease.shape)
        return self._chains(seen), self._chains(ease)

    def accepted(self, _correct: Numbers) -> None:
        """So many drafts [B] were: what comes next does not depend on it."""

    def _chains(self, ease: Array) -> Array:
        return _sigmoid(np.array(self.middles) + ease).cumprod(axis=1)

    def _ease(self, rng: np.random.Generator, batch: int, layers: int) -> Array:
        """[B, D]: half of the variance is the request's, half the token's."""
        scale = self.spread / np.sqrt(2.0)
        return rng.normal(0.0, scale, (batch, 1)) + rng.normal(0.0, scale, (batch, layers))


class RecordedDrafts:
    """Drafts that a server recorded behind every token of its answers.

    Requests are answered B at a time, one after the other, and from the first again after the
    last. A draft's true survival is what became of it: 1 or 0.

    Args:
        chains: The recording.
        policy: Gives the confidences.
        layers: D, of at most those that were recorded.
    """

    def __init__(self, chains: Chains, policy: Gate, layers: int) -> None:
        self.layers = layers
        self._confidence = chains.confidences(policy)[:, :layers].numpy().astype(np.float64)
        self._survived = np.arange(layers) < chains.num_correct.numpy()[:, None]
        self._starts = chains.first_root.numpy()
        self._next = 0
        self._at = self._ends = np.empty(0, dtype=np.int64)  # [B] roots, and where answers end

    def draw(self, _rng: np.random.Generator, batch: int) -> tuple[Array, Array]:
        """Confidences and survivals of the batch's next drafts, each [B, D]."""
        self._at, self._ends = self._at[:batch], self._ends[:batch]
        for _ in range(batch - len(self._at)):
            self._join(len(self._at))
        return self._confidence[self._at], self._survived[self._at].astype(np.float64)

    def accepted(self, correct: Numbers) -> None:
        """So many drafts [B] were, and a bonus token: the next ones stand behind them."""
        self._at = self._at + np.asarray(correct, dtype=np.int64) + 1
        for request in np.flatnonzero(self._at >= self._ends):
            self._join(int(request))

    def _join(self, place: int) -> None:
        start, end = self._starts[self._next : self._next + 2]
        self._next = (self._next + 1) % (len(self._starts) - 1)
        self._at = np.concatenate((self._at[:place], [start], self._at[place + 1 :]))
        self._ends = np.concatenate((self._ends[:place], [end], self._ends[place + 1 :]))


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step by a roofline: an EAGLE-3 head beside a model of some shape."""

    shape: Shape
    ceilings: Ceilings
    context: float = 1024.0
    launch_ms: float = 0.05
    """Of any forward, beyond its roofline."""

    host_ms: float = 0.4
    """Of a step."""

    def verify(self, rows: Numbers, batch: int) -> Array:
        """Of T ``rows``, padded to their tiers already."""
        work = [
            forward(self.shape, rows=float(n), batch=batch, context=self.context)
            for n in np.atleast_1d(rows)
        ]
        return np.array([1e3 * one.seconds(self.ceilings) + self.launch_ms for one in work])

    def draft(self, batch: int, layers: int) -> float:
        """Of d ``layers`` behind the first, which draft extend brings."""
        if layers < 2:
            return 0.0
        one = forward(self.shape, rows=batch, batch=batch, context=self.context, draft=True)
        return (layers - 1) * (1e3 * one.seconds(self.ceilings) + self.launch_ms)

    def rest(self, batch: int, *, extends: bool = True) -> float:
        """Host and draft extend, which runs over two rows a request."""
        if not extends:
            return self.host_ms
        one = forward(self.shape, rows=2.0 * batch, batch=batch, context=self.context, draft=True)
        return self.host_ms + self.launch_ms + 1e3 * one.seconds(self.ceilings)


@dataclass(frozen=True)
class MeasuredCosts:
    """The same from curves that a planner has measured."""

    curves: StepCost

    def verify(self, rows: Numbers, _batch: int) -> Array:
        """Of T ``rows``."""
        return np.array([self.curves.verify(size) for size in rows.tolist()])

    def draft(self, batch: int, layers: int) -> float:
        """Of d ``layers`` behind the first."""
        return max(layers - 1, 0) * self.curves.layer(batch)

    def rest(self, batch: int, *, extends: bool = True) -> float:
        """What a step takes beside; nobody has measured it without draft extend."""
        return self.curves.rest(batch)


class Step(NamedTuple):
    """What a rule did in one step."""

    layers: int
    rows: int
    tokens: float
    milliseconds: float


@dataclass
class Simulation:
    """B requests that never end, and rules that serve them."""

    drafts: Drafts | RecordedDrafts
    costs: Costs | MeasuredCosts
    batch: int
    seed: int = 0

    tiers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = self.drafts.layers
        every = Tiers(self.batch, self.layers + 1).rows
        self.tiers = [rows for rows in every if rows >= self.batch]

    def none(self, _steps: int = 0) -> float:
        """Tokens a second without speculation."""
        took = self.costs.verify(np.array([self.batch]), self.batch)[0]
        return 1e3 * self.batch / (took + self.costs.rest(self.batch, extends=False))

    def fixed(self, layers: int, steps: int) -> float:
        """Tokens a second where every draft of d ``layers`` is verified."""
        return self._serve(steps, lambda _: (layers, self.batch * (layers + 1)), None)

    def bound(self, steps: int) -> float:
        """Tokens a second of one that knows all costs and every draft's true survival.

        Which no planner does: what it could reach at most.
        """

        def plan(survival: Array) -> tuple[int, int]:
            depths = range(1, self.layers + 1)
            best = best_plan(survival, self.batch, self._cost, depths=depths, tiers=self.tiers)
            return best.layers, best.rows

        return self._serve(steps, plan, None)

    def planned(self, planner: Planner, steps: int, *, learning: int = 400) -> float:
        """Tokens a second of a planner, once it has learnt for a while."""
        self._serve(learning, None, planner)
        return self._serve(steps, None, planner)

    def step(self, rng: np.random.Generator, planner: Planner) -> Step:
        """One step of a planner."""
        confidence, survival = self.drafts.draw(rng, self.batch)
        plan = planner.plan(BatchView(self.batch, self.tiers, range(1, self.layers + 1)))
        drafted = confidence[:, : plan.num_layers]
        kept = self._best(planner.survival.of_chains(drafted), plan.row_budget - self.batch)
        correct = self._correct(rng, survival, kept)
        self.drafts.accepted(correct)
        tier = min(t for t in self.tiers if t >= plan.row_budget)
        verify_ms = float(self.costs.verify(np.array([tier]), self.batch)[0])
        draft_ms = self.costs.draft(self.batch, plan.num_layers)
        took = verify_ms + draft_ms + self.costs.rest(self.batch)
        times = StepTimes(tier, verify_ms, draft_ms, took)
        outcome = drafted, kept, correct
        planner.learn(StepRecord(plan, self.batch, outcome=outcome, times=times))
        return Step(plan.num_layers, plan.row_budget, self.batch + float(correct.sum()), took)

    def _serve(
        self,
        steps: int,
        rule_of: Callable[[Array], tuple[int, int]] | None,
        planner: Planner | None,
    ) -> float:
        rng = np.random.default_rng([self.seed, self.batch, steps])
        tokens = milliseconds = 0.0
        for _ in range(steps):
            if planner is not None:
                step = self.step(rng, planner)
            else:
                assert rule_of is not None
                step = self._ruled(rng, rule_of)
            tokens, milliseconds = tokens + step.tokens, milliseconds + step.milliseconds
        return 1e3 * tokens / milliseconds

    def _ruled(self, rng: np.random.Generator, rule_of: Callable[[Array], tuple[int, int]]) -> Step:
        _, survival = self.drafts.draw(rng, self.batch)
        layers, rows = rule_of(survival)
        kept = self._best(survival[:, :layers], rows - self.batch)
        correct = self._correct(rng, survival, kept)
        self.drafts.accepted(correct)
        tier = min(t for t in self.tiers if t >= rows)
        took = self._cost(np.array([tier]), self.batch, [layers]).item()
        return Step(layers, rows, self.batch + float(correct.sum()), took)

    def _cost(self, rows: Numbers, batch: int, depths: Sequence[int]) -> Array:
        beside = [self.costs.draft(batch, d) + self.costs.rest(batch) for d in depths]
        return np.asarray(self.costs.verify(rows, batch) + np.array(beside)[:, None])

    def _best(self, survival: Array, drafts: int) -> Numbers:
        """[B]: drafts of each request among the best; of equals the shallower."""
        order = np.argsort(-survival.T.ravel(), kind="stable")[:drafts]
        return np.bincount(order % self.batch, minlength=self.batch)

    def _correct(self, rng: np.random.Generator, survival: Array, kept: Numbers) -> Numbers:
        alive = (rng.uniform(size=(self.batch, 1)) < survival).sum(axis=1)
        return np.minimum(alive, kept)


def table(
    drafts_of: Callable[[str], Drafts | RecordedDrafts],
    costs: Costs | MeasuredCosts,
    batches: Sequence[int],
    steps: int,
) -> list[str]:
    """Markdown: every rule against no speculation, a line for each batch.

    ``drafts_of`` gives drafts as a policy of that name sees them, from the beginning.
    """
    layers = drafts_of("auto").layers
    names = [*(f"fixed {n}" for n in range(1, layers + 1)), "rows only", "auto", "bound"]
    lines = [row("batch", ["tokens/s without", *names]), rule(1 + len(names))]
    for batch in batches:

        def made(policy: str = "auto", batch: int = batch) -> Simulation:
            return Simulation(drafts_of(policy), costs, batch)

        base = made().none()
        rates = [
            *(made().fixed(n, steps) for n in range(1, layers + 1)),
            made("rows-only").planned(Planner(layers, OneSlope(layers), all_layers=True), steps),
            made().planned(Planner(layers, Survival(layers)), steps),
            made().bound(steps),
        ]
        lines.append(row(str(batch), [f"{base:.0f}", *(f"{rate / base:.2f}" for rate in rates)]))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a machine or of measured curves; 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m eval.simulate", description=__doc__)
    parser.add_argument("--machine", choices=sorted(MACHINES), default="h200")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="of the target")
    parser.add_argument("--curves", type=Path, help="JSON of GET /c2t, in the machine's place")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--recording", type=Path, help="drafts of a recording, roots: every")
    parser.add_argument("--positions", type=float, nargs="+", default=POSITIONS[:5])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)
    try:
        if min(*args.batch, args.steps) < 1:
            raise ConfigError("--batch and --steps must be 1 or more")
        costs = costs_of(args.curves, args.shape, args.machine)
        lines = table(_drafts(args), costs, args.batch, args.steps)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    source = args.curves or f"{args.machine} (data sheet x {REACHED}), {args.shape}"
    print(f"SIMULATED on {source}; times no speculation; 'bound' knows every draft's survival\n")
    print("\n".join(lines))
    return 0


def costs_of(
    curves: Path | None, shape: str = "8b", machine: str = "h200"
) -> Costs | MeasuredCosts:
    """From what GET /c2t told, or else of a model's shape on a machine."""
    return _curves(curves) if curves else Costs(SHAPES[shape], MACHINES[machine])


def _drafts(args: argparse.Namespace) -> Callable[[str], Drafts | RecordedDrafts]:
    drawn = Drafts(args.positions)
    if args.recording is None:
        return lambda _policy: drawn
    chains = Chains.from_recording(read_recording(args.recording))
    return lambda policy: RecordedDrafts(chains, gate_of(policy), len(args.positions))


def gate_of(policy: str) -> Gate:
    """What gives a policy's confidences."""
    gate: Any = build_policy(C2TConfig(policy=policy))
    return gate


def _curves(path: Path) -> MeasuredCosts:
    """From what GET /c2t told; :class:`ConfigError` for any other file."""
    try:
        told: Any = parse_json(read_text(path), source="it")
        found = told.get("planner", told)
        planner = found[0] if isinstance(found, list) else found  # of all ranks, or of one
        curves = StepCost()
        curves.restore(planner["cost_ms"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} holds no cost curves of a planner: {error}") from error
    if not curves.verify.known:
        raise ConfigError(f"{path}: the planner had measured nothing yet")
    return MeasuredCosts(curves)


def _middle(ease: Array, alive: Array, wanted: float) -> float:
    """M with which drafts of such ``ease`` [n], whose parents are ``alive`` so often [n], are
    accepted as often as ``wanted``.
    """
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        short = float(np.mean(alive * _sigmoid(middle + ease))) < wanted
        low, high = (middle, high) if short else (low, middle)
    return low


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


if __name__ == "__main__":
    sys.exit(main())

"""The planner alongside a made-up server whose costs and survivals are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from sglang_c2t.plan.explore import AT_LEAST_EVERY, COLD_START_BUDGET
from sglang_c2t.plan.plan import Plan, best_of, every_plan
from sglang_c2t.plan.planner import FULL_EVERY, LEARN_EVERY, Planner
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord, StepTimes
from sglang_c2t.plan.survival import OneSlope, Survival
from sglang_c2t.plan.verdicts import ENOUGH, FEW, Comparison

DEPTH = 5

#: Steps after which the record of a step arrives, as on a device that the host runs ahead of.
LAG = 2


@dataclass
class MadeUpServer:
    """Serves B requests: draws chains, verifies what the plan says, takes its time.

    A draft of confidence c survives with probability c ** ``power``: confidences rank well and
    mean nothing until they are calibrated.
    """

    batch: int
    row_ms: float = 1.0
    layer_ms: float = 4.0
    floor_ms: float = 30.0
    power: float = 2.0
    pause_ms: float = 0.0
    token_ms: float = 0.0
    context: int = 0
    """Tokens before the drafts, of the whole batch."""
    gate_ms: float | None = None
    """Cost of a step that scores drafts; ``None`` where every step must."""
    extend_ms: float | None = None
    """Cost of draft extend, which draft-free steps run once a burst; ``None``: there are none."""
    pending: int = 0
    """Steps of the current burst of draft-free steps."""
    goes_on: bool = True
    """Whether that burst goes on after this step."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    late: list[StepRecord] = field(default_factory=list)

    def chains(self, batch: int) -> np.ndarray:
        """[B, D] confidences that a draft and all before it are accepted."""
        odds = self.rng.normal(1.5, 1.5, (batch, 1)) + self.rng.normal(0, 0.7, (batch, DEPTH))
        return np.cumprod(1.0 / (1.0 + np.exp(-odds)), axis=1)

    def cost(self, rows: np.ndarray, _batch: int, depths: Sequence[int]) -> np.ndarray:
        layers = np.array(depths)[:, None]
        floor_ms = self.floor_ms + self.token_ms * self.context
        return floor_ms + self.row_ms * rows + self.layer_ms * (layers - 1)

    def tiers(self) -> list[int]:
        return list(range(self.batch, self.batch * (DEPTH + 1) + 1))

    def view(self) -> BatchView:
        return BatchView(
            self.batch, self.tiers(), range(1, DEPTH + 1), self.context,
            allows_uniform=self.gate_ms is not None,
            allows_draft_free=self.extend_ms is not None,
        )  # fmt: skip

    def serve(self, planner: Planner, steps: int) -> tuple[list[StepPlan], float]:
        """So many steps; returns what was planned and tokens a millisecond."""
        plans, all_tokens, spent = [], 0.0, 0.0
        burst = StepPlan(StepKind.UNIFORM, 0, 1, self.batch)
        for _ in range(steps):
            chains = self.chains(self.batch)
            self.goes_on = not self.pending or planner.stays_draft_free(self.view())
            plan = burst if self.pending else planner.plan(self.view())
            lives = (self.rng.uniform(size=(self.batch, 1)) < chains**self.power).sum(axis=1)
            uniform, outcome = plan.kind is StepKind.UNIFORM, ()
            if uniform:
                assert plan.row_budget == self.batch * (1 + plan.num_layers)
                correct = np.minimum(lives, plan.num_layers)
            else:
                drafted = chains[:, : plan.num_layers]
                drafts = self.kept(planner, drafted, plan.row_budget - self.batch)
                correct = np.minimum(lives, drafts)
                outcome = drafted, drafts, correct
            times = self.times(plan)
            late = StepRecord(
                plan, self.batch, self.context, outcome, num_correct=correct, times=times
            )
            self.late.append(late)
            if len(self.late) > LAG:
                planner.learn(self.late.pop(0))
            spent += times.step_ms
            all_tokens += self.batch + correct.sum()
            plans.append(plan)
        return plans, all_tokens / spent

    def times(self, plan: StepPlan) -> StepTimes:
        """Cost of a step; uniform steps have no ``gate_ms``."""
        draft_ms = self.layer_ms * max(plan.num_layers - 1, 0)
        extend_ms = self.extend_ms or 0.0
        extends = 0
        if plan.num_layers == 0:
            self.pending += 1
            extends = 0 if self.goes_on else -(-self.pending // (DEPTH + 1))
            draft_ms, extend_ms = extends * extend_ms, 0.0
            self.pending = self.pending if self.goes_on else 0
        verify_ms = self.floor_ms + self.row_ms * plan.row_budget + self.pause_ms
        verify_ms += self.token_ms * self.context
        gate_ms = 0.0 if plan.kind is StepKind.UNIFORM else self.gate_ms or 0.0
        step_ms = verify_ms + draft_ms + gate_ms + extend_ms
        return StepTimes(plan.row_budget, verify_ms, draft_ms, step_ms, extends)

    def seed(self, planner: Planner, rows: int, slower: float = 1.0) -> None:
        """Dummy requests measured this, before the server served."""
        plan = StepPlan(StepKind.WARMUP, DEPTH, 1, rows)
        verify_ms = self.cost(np.array([rows]), self.batch, [1]).item() * slower
        times = StepTimes(rows, verify_ms, (DEPTH - 1) * self.layer_ms)
        planner.learn(StepRecord(plan, self.batch, times=times))

    def kept(self, planner: Planner, drafted: np.ndarray, drafts: int) -> np.ndarray:
        """[B]: drafts of each request among the best."""
        survival = planner.survival.of_chains(drafted)
        order = np.argsort(-survival.T.ravel(), kind="stable")[:drafts]
        return np.bincount(order % self.batch, minlength=self.batch)

    def best_rate(self) -> float:
        """Oracle: of the best plan for chains whose survival and cost are known."""
        survival, depths = self.chains(4000) ** self.power, range(1, DEPTH + 1)
        plans = every_plan(survival, self.batch, self.cost, depths=depths, tiers=self.tiers())
        return best_of(plans.best_of_each_depth()).rate


@pytest.mark.parametrize("batch", [4, 32])
@pytest.mark.parametrize("row_ms", [0.05, 1.0, 5.0])
def test_planner_rate_is_near_the_best_plan(batch: int, row_ms: float) -> None:
    """Within five percent: ranking, exploring, and for four requests rows planned before drafts.
    Over 1,200 steps, because chance moves the rate of 300 by three percent.
    """
    server = MadeUpServer(batch, row_ms)
    planner = Planner(DEPTH, Survival(DEPTH))
    server.serve(planner, 300)
    _, rate = server.serve(planner, 1200)
    assert rate >= 0.95 * server.best_rate()


def uniform_rate(server: MadeUpServer) -> float:
    """Oracle: of the best fixed number of drafts, without a gate."""
    survival = server.chains(4000) ** server.power
    rates = []
    for drafts in range(1, DEPTH + 1):
        tokens = server.batch * (1 + survival[:, :drafts].mean(axis=0).sum())
        rows = np.array([server.batch * (1 + drafts)])
        rates.append(tokens / server.cost(rows, server.batch, [drafts]).item())
    return max(rates)


@pytest.mark.parametrize(("batch", "servers"), [(1, 12), (4, 3), (32, 1)])
def test_planner_makes_uniform_steps_where_scoring_costs_more_than_it_brings(
    batch: int, servers: int
) -> None:
    """Small explorations, which seldom run out, leave something for the first uniform steps as
    well: without a turn of their own one in twelve of these servers never made any.
    """
    rates = []
    for seed in range(servers):
        rng = np.random.default_rng(seed)
        server = MadeUpServer(batch, row_ms=0.2, layer_ms=1.0, gate_ms=10.0, rng=rng)
        planner = Planner(DEPTH, Survival(DEPTH))
        server.serve(planner, 500)
        plans, rate = server.serve(planner, 1500)
        assert np.mean([plan.kind is StepKind.UNIFORM for plan in plans]) > 0.8
        rates.append(rate / uniform_rate(server))
    assert np.mean(rates) >= 0.96, "one step of seventeen at least is planned, a quarter longer"


class SlowFirstUniformStep(MadeUpServer):
    """After it some requests end, and others begin."""

    def times(self, plan: StepPlan) -> StepTimes:
        times = super().times(plan)
        if plan.kind is StepKind.UNIFORM and self.context == 100:
            self.context = 200
            times = times._replace(step_ms=times.step_ms + 15.0)
        return times


def test_planner_tries_uniform_steps_again_after_a_single_slow_one() -> None:
    """Otherwise they seem to cost what planned ones do, for 400 steps."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        server = SlowFirstUniformStep(
            4, row_ms=0.2, layer_ms=1.0, gate_ms=5.0, context=100, rng=rng
        )
        plans, _ = server.serve(Planner(DEPTH, Survival(DEPTH)), 300)
        assert np.mean([plan.kind is StepKind.UNIFORM for plan in plans[150:]]) > 0.6


def test_planner_makes_planned_steps_where_scoring_costs_nothing() -> None:
    """Uniform ones are tried now and then, for half a percent of the time."""
    server = MadeUpServer(8, row_ms=3.0, gate_ms=0.0)
    planner = Planner(DEPTH, Survival(DEPTH))
    server.serve(planner, 500)
    plans, rate = server.serve(planner, 3000)
    assert np.mean([plan.kind is StepKind.UNIFORM for plan in plans]) < 0.02
    assert rate >= 0.95 * server.best_rate()


def proportional(**more: float) -> MadeUpServer:
    """A server whose rows cost in proportion, so that few drafts are worth theirs."""
    return MadeUpServer(32, 3.0, **{"floor_ms": 5.0, "gate_ms": 0.0, "extend_ms": 25.0} | more)


def test_planner_makes_draft_free_steps_where_no_draft_is_worth_its_rows() -> None:
    planner, server = Planner(DEPTH, Survival(DEPTH)), proportional(power=12.0)
    server.serve(planner, 600)
    plans, rate = server.serve(planner, 1800)
    assert np.mean([plan.num_layers == 0 for plan in plans]) > 0.9
    assert rate > 0.98 * 32 / (5.0 + 3.0 * 32 + 25.0 / (DEPTH + 1))
    assert 0.98 < planner.predicted_over_measured < 1.02


def test_planner_draft_free_plan_goes_on_while_requests_come_and_go_and_contexts_change() -> None:
    planner, server = Planner(DEPTH, Survival(DEPTH)), proportional(power=12.0)
    server.serve(planner, 900)
    drafting = 0
    for server.batch, server.context in [(32, 2000), (31, 3000), (33, 4000)] * 20:
        plans, _ = server.serve(planner, 20)
        drafting += sum(plan.num_layers > 0 for plan in plans)
    assert drafting < 0.03 * 60 * 20


def test_planner_tries_draft_free_steps_with_each_number_of_requests() -> None:
    """Those of 4 requests say little of 32."""
    planner, server = Planner(DEPTH, Survival(DEPTH)), proportional(power=6.0)
    server.batch = 4
    server.serve(planner, 400)
    server.batch = 32
    plans, _ = server.serve(planner, 40)
    assert any(plan.num_layers == 0 for plan in plans)


class NoisyServer(MadeUpServer):
    """Other work makes its steps longer or shorter."""

    def times(self, plan: StepPlan) -> StepTimes:
        _, verify_ms, draft_ms, step_ms, extends = super().times(plan)
        longer = float(np.exp(0.08 * self.rng.normal()))
        return StepTimes(
            plan.row_budget, longer * verify_ms, longer * draft_ms, longer * step_ms, extends
        )


def test_planner_finds_out_by_few_noisy_measurements_that_no_draft_pays() -> None:
    """Planned steps seem faster than they are, as the best of many. Draft-free ones were taken for
    as much slower than measured, and were seldom tried again.
    """
    shares = []
    for seed in range(6):
        server = NoisyServer(
            32, 3.0, gate_ms=3.0, extend_ms=2.0, power=8.0, rng=np.random.default_rng(seed)
        )
        planner = Planner(DEPTH, Survival(DEPTH))
        server.serve(planner, 300)
        plans, _ = server.serve(planner, 300)
        shares.append(np.mean([plan.num_layers == 0 for plan in plans]))
    assert np.mean(shares) > 0.5


@pytest.mark.parametrize(("slow_steps", "teach"), [(2, 0), (3, 1)])
def test_planner_learns_no_costs_from_pauses_of_the_machine(slow_steps: int, teach: int) -> None:
    planner, server = Planner(DEPTH, Survival(DEPTH)), MadeUpServer(8)
    server.serve(planner, 300)
    (plan,), _ = server.serve(planner, 1)
    before, server.late = planner.cost.verify.measurements, []
    for _ in range(slow_steps):
        times = server.times(plan)
        times = times._replace(verify_ms=8000.0, step_ms=times.step_ms + 8000.0)
        planner.learn(StepRecord(plan, 8, times=times))
    assert planner.cost.verify.measurements - before == teach


def test_planner_tries_draft_free_steps_that_a_slow_moment_before_serving_made_dear() -> None:
    """32 rows seem to take 160 ms and take 101. Smaller batches have used up the exploration."""
    planner, server = Planner(DEPTH, Survival(DEPTH)), proportional(power=12.0)
    for rows, slower in ((32, 1.6), (64, 1.0), (192, 1.0)):
        server.seed(planner, rows, slower)
    planner._explore.budget = 0.0
    plans, _ = server.serve(planner, 100)
    assert np.mean([plan.num_layers == 0 for plan in plans]) > 0.5


def test_planner_makes_no_draft_free_steps_where_drafts_are_worth_their_rows() -> None:
    planner, server = Planner(DEPTH, Survival(DEPTH)), MadeUpServer(32, 0.3, 4.0, 60.0, extend_ms=5)
    server.serve(planner, 300)
    plans, _ = server.serve(planner, 900)
    assert all(plan.num_layers for plan in plans)


@pytest.mark.parametrize("extend_ms", [None, 6.0])
@pytest.mark.parametrize("limit", [47.0, 43.0, 10.0])
def test_planner_steps_keep_the_limit_of_time_per_token_where_a_plan_does(
    limit: float, extend_ms: float | None
) -> None:
    """Without a limit, steps of this server take over 50 ms; the shortest take 39."""
    free, planner = MadeUpServer(8, 1.0, extend_ms=extend_ms), Planner(DEPTH, Survival(DEPTH))
    plans, _ = free.serve(planner, 800)
    assert np.mean([free.times(plan).step_ms for plan in plans[400:]]) > 50.0
    server, planner = MadeUpServer(8, 1.0, extend_ms=extend_ms), Planner(DEPTH, Survival(DEPTH))
    planner.tpot_ms = limit
    server.serve(planner, 800)
    plans, rate = server.serve(planner, 800)
    steps = [server.times(plan).step_ms for plan in plans if plan.kind is not StepKind.EXPLORE]
    assert np.mean(steps) <= max(limit, 39.5) * 1.01
    if limit == 47.0:
        assert rate > 1.03 * 8 / 38.0, "it still drafts"


@dataclass
class UnequalRequests(MadeUpServer):
    """Requests of 40 steps, whose drafts survive unequally."""

    made: int = 0

    def chains(self, batch: int) -> np.ndarray:
        if self.made % 40 == 0:
            self.power = POWERS[self.made // 40]
        self.made += 1
        return super().chains(batch)


POWERS = np.random.default_rng(0).choice([0.8, 2.0, 4.0, 8.0], size=75)


def test_planner_follows_requests_whose_drafts_survive_unequally() -> None:
    """One request at a time. Uniform steps teach no survivals, so that the tokens of the last
    steps must tell how deep to draft.
    """
    server = UnequalRequests(1, 4.0, 7.0, 90.0, gate_ms=2.0, extend_ms=9.0)
    _, rate = server.serve(Planner(DEPTH, Survival(DEPTH)), 40 * len(POWERS))
    draws, lots = server.rng.uniform(size=(40 * len(POWERS), 1)), MadeUpServer(1)
    lives = (draws < lots.chains(len(draws)) ** np.repeat(POWERS, 40)[:, None]).sum(axis=1)
    fixed = [
        (1.0 + np.minimum(lives, n).mean()) / (90.0 + 4.0 * (1 + n) + 7.0 * (n - 1) + 9.0)
        for n in range(1, DEPTH + 1)
    ]
    assert rate > 0.98 * max(fixed)


@pytest.mark.parametrize(("before", "after"), [(12.0, 0.5), (0.5, 12.0)])
def test_planner_draft_free_steps_begin_and_end_with_the_traffic(
    before: float, after: float
) -> None:
    """Four requests, whose drafts are worth their rows, or hardly survive. Bursts leave few steps
    to learn from.
    """
    server = MadeUpServer(4, 1.5, floor_ms=45.0, power=before, gate_ms=5.0, extend_ms=25.0)
    planner = Planner(DEPTH, Survival(DEPTH))
    shares = []
    for server.power in (before, after):
        server.serve(planner, 1800)
        plans, _ = server.serve(planner, 200)
        shares.append(np.mean([plan.num_layers == 0 for plan in plans]))
    assert [share > 0.9 for share in shares] == [before > after, after > before]


def test_planner_draft_free_plan_holds_for_constrained_requests_but_no_opt_out() -> None:
    planner, server = Planner(DEPTH, Survival(DEPTH)), proportional(power=12.0)
    server.serve(planner, 900)
    opted_out = replace(server.view(), allows_draft_free=False, allows_uniform=False)
    constrained = replace(server.view(), num_constrained=1, allows_uniform=False)
    for view, free in ((server.view(), True), (opted_out, False), (constrained, True)):
        planned = [planner.plan(view).num_layers == 0 for _ in range(40)]
        assert any(planned) == free


def test_planner_uniform_plan_is_of_one_batch_size() -> None:
    server = MadeUpServer(4, row_ms=0.2, layer_ms=1.0, gate_ms=10.0)
    planner = Planner(DEPTH, Survival(DEPTH))
    server.serve(planner, 500)
    for _ in range(200):
        if planner.plan(server.view()).kind is StepKind.PLANNED:
            break
    assert planner.plan(server.view()).kind is StepKind.UNIFORM
    assert planner.plan(MadeUpServer(9, gate_ms=10.0).view()).kind is not StepKind.UNIFORM
    assert (
        planner.plan(replace(server.view(), num_constrained=1, allows_uniform=False)).kind
        is not StepKind.UNIFORM
    )
    assert planner.plan(server.view()).kind is StepKind.UNIFORM


def test_planner_keeps_a_plan_that_holds() -> None:
    """Most steps of a steady load take no time to plan."""
    server = MadeUpServer(16)
    planner = Planner(DEPTH, Survival(DEPTH))
    server.serve(planner, 500)
    plans, _ = server.serve(planner, 500)
    assert np.mean([a is b for a, b in pairwise(plans)]) > 0.8


def test_planner_explores_rarely_where_rows_are_expensive() -> None:
    server = MadeUpServer(8, row_ms=40.0, layer_ms=50.0, floor_ms=0.0)
    planner = Planner(DEPTH, Survival(DEPTH))
    server.serve(planner, 100)
    plans, _ = server.serve(planner, 2 * AT_LEAST_EVERY)
    assert np.mean([plan.num_layers == 1 for plan in plans]) > 0.95
    explored = [plan.num_layers for plan in plans if plan.kind is StepKind.EXPLORE]
    assert len(explored) <= 40
    assert {2, DEPTH} <= set(explored)


@pytest.mark.parametrize(("slow_steps", "faster"), [(1, True), (FEW, False)])
def test_comparison_does_not_take_one_slow_uniform_step_for_all(slow_steps, faster) -> None:
    """Otherwise no uniform step follows that could show the contrary."""
    comparison, planned, uniform = Comparison(), Plan(2, 3, 1.5, 110.0), Plan(2, 3, 1.5, 105.0)
    for ratio, times, is_uniform in ((1.0, 20, False), (1.3, slow_steps, True)):
        for _ in range(times):
            comparison.took(1, ratio, uniform=is_uniform, draft_free=False)
    for step in range(ENOUGH):
        comparison.add(step, 1, planned, uniform)
    rate, uniform_rate = comparison.rates(1)
    assert (uniform_rate > rate) == faster


def test_planner_recovers_from_slow_first_steps() -> None:
    """One more layer costs little to look at, and two good moments outweigh five bad ones."""
    planner = Planner(DEPTH, Survival(DEPTH))
    MadeUpServer(4, layer_ms=80.0).serve(planner, 6)
    server = MadeUpServer(4, row_ms=0.01)
    server.serve(planner, 250)
    _, rate = server.serve(planner, 300)
    assert rate >= 0.95 * server.best_rate()


def test_planner_verifies_a_full_draft_of_each_request_in_turn() -> None:
    planner = Planner(DEPTH, Survival(DEPTH))
    plans, _ = MadeUpServer(3).serve(planner, 4 * FULL_EVERY)
    full = [plan.full_draft_of for plan in plans if plan.full_draft_of is not None]
    assert full == [1, 2, 0, 1]


def test_planner_explores_the_best_plans_first() -> None:
    """A server in its cold start loses little by it."""
    server = MadeUpServer(8, row_ms=2.0)
    planner = Planner(DEPTH, Survival(DEPTH))
    for rows in server.tiers():
        server.seed(planner, rows)
    chains = server.chains(2000)
    lives = server.rng.uniform(size=(2000, 1)) < chains**server.power
    planner.learn(outcome(chains, np.full(2000, DEPTH), lives.sum(axis=1)))
    plans, _ = server.serve(planner, 12 * (1 + LAG))  # each awaits the record of the last one
    explored = [plan for plan in plans if plan.kind is StepKind.EXPLORE]
    assert len(explored) > 5
    survival = server.chains(4000) ** server.power
    for plan in explored:
        (best,) = every_plan(
            survival, 8, server.cost, depths=[plan.num_layers], tiers=[plan.row_budget]
        ).best_of_each_depth()
        assert best.rate > 0.9 * server.best_rate()


@pytest.mark.parametrize("seed", range(5))
def test_planner_follows_traffic_whose_contexts_grow(seed: int) -> None:
    """Each row costs as little as before: what takes fifteen times as long is attention."""
    server = MadeUpServer(16, row_ms=0.3, layer_ms=0.3, floor_ms=5.0, token_ms=0.002)
    server.rng = np.random.default_rng(seed)
    planner = Planner(DEPTH, Survival(DEPTH))
    for server.context in (2000, 2200, 2500):
        server.serve(planner, 150)
    server.context = 75_000
    _, rate = server.serve(planner, 200)
    assert rate > 0.96 * server.best_rate()


@pytest.mark.parametrize(("dearest", "looks"), [(400.0, True), (900.0, False)])
def test_planner_explores_an_unmeasured_row_count_that_is_nearly_best(
    dearest: float, looks: bool
) -> None:
    """20 rows, between 16 of 100 ms and 48 of more: a line makes them 8 or 35 percent slower."""
    planner = Planner(DEPTH, Survival(DEPTH))
    for rows, verify_ms in [(8, 100.0), (16, 100.0), (48, dearest)] * 3:
        plan, times = StepPlan(StepKind.PLANNED, 2, 1, rows), StepTimes(rows, verify_ms, 1.0, 0.0)
        times = times._replace(step_ms=verify_ms + 11.0)
        planner.learn(StepRecord(plan, 8, times=times))
    planner.learn(outcome(np.full((8, DEPTH), 0.9), np.zeros(8), np.zeros(8)))
    view = BatchView(8, [8, 16, 20, 48], range(1, DEPTH + 1))
    assert planner.plan(view).row_budget == (20 if looks else 16)


def outcome(*of_chains: np.ndarray, constrained: bool = False) -> StepRecord:
    """A step of whose times nothing is known."""
    batch, layers = of_chains[0].shape
    mask = np.full(batch, constrained)
    plan = StepPlan(StepKind.PLANNED, layers, 1, batch * (1 + layers))
    return StepRecord(plan, batch, outcome=of_chains, constrained=mask)


def test_planner_learns_outcomes_in_blocks_and_loses_none() -> None:
    """Each while there are few; once there are many, the last ones wait until someone asks."""
    at_once, together = (Planner(DEPTH, Survival(DEPTH)) for _ in range(2))
    server = MadeUpServer(2)
    learnt_at = []
    for step in range(200):
        drafted = server.chains(2)[:, : 1 + step % DEPTH]
        record = outcome(drafted, np.full(2, drafted.shape[1]), np.array([1, 0]))
        before = together.free.predictions.counts[0].sum()
        together.learn(record)
        if together.free.predictions.counts[0].sum() > before:
            learnt_at.append(step)
        at_once.learn(record)
        at_once.catch_up()
    assert learnt_at[:10] == [*range(10)]
    assert np.diff(learnt_at).max() == LEARN_EVERY
    seen = [planner.report()["reliability"]["drafts"] for planner in (at_once, together)]
    assert np.sum(seen, axis=(1, 2)).tolist() == [sum(2 * (1 + n % DEPTH) for n in range(200))] * 2
    chains = server.chains(50)
    learnt = [planner.survival.of_chains(chains) for planner in (at_once, together)]
    assert learnt[0] == pytest.approx(learnt[1], rel=0.01)


def test_planner_report_of_predictions_and_confidences() -> None:
    server = MadeUpServer(16)
    planner = Planner(DEPTH, Survival(DEPTH))
    server.serve(planner, 50)
    assert planner.predicted_over_measured == pytest.approx(1.0, abs=0.02)
    planner.free.predictions.reset()  # before it had learnt anything
    server.serve(planner, 1_200)  # 20 bins: fewer drafts leave more noise than the bound
    assert max(planner.calibration_errors()[:2]) < 0.02, "the others have a thousand at most"
    told = json.loads(json.dumps(planner.report()))
    assert told["steps"] == 1_250
    assert np.sum(told["reliability"]["survived"]) > 1000
    drafts, promised, survived = (
        sum(told["confidence"][name]) for name in ("drafts", "promised", "survived")
    )
    assert drafts > 1000
    assert survived < 0.9 * promised, "raw confidences, which a plan calibrates"


def test_planner_with_one_slope_drafts_every_layer() -> None:
    server = MadeUpServer(32, row_ms=3.0, gate_ms=10.0)
    planner = Planner(DEPTH, OneSlope(DEPTH), all_layers=True)
    plans, _ = server.serve(planner, 300)
    assert {plan.num_layers for plan in plans} == {DEPTH}
    assert plans[-1].row_budget < 32 * (DEPTH + 1)
    assert StepKind.UNIFORM not in {plan.kind for plan in plans}


@pytest.mark.parametrize("kind", [Survival, OneSlope])
def test_planner_state_is_restored_and_reset(kind: type) -> None:
    server = MadeUpServer(8)
    planner, again = Planner(DEPTH, kind(DEPTH)), Planner(DEPTH, kind(DEPTH))
    server.serve(planner, 250)
    again.restore(json.loads(json.dumps(planner.state())))
    chains = server.chains(20)
    expected = planner.survival.of_chains(chains)
    assert again.survival.of_chains(chains) == pytest.approx(expected)
    assert again.cost.one(20, 8, 3) == pytest.approx(planner.cost.one(20, 8, 3))
    budgets = [each._explore.budget for each in (planner, again)]
    assert budgets[0] == budgets[1] < COLD_START_BUDGET, "what was paid for is not due again"
    again.reset()
    unknown = kind(DEPTH).of_chains(chains)
    assert again.survival.of_chains(chains) == pytest.approx(unknown)
    same = pytest.approx(planner.cost.one(20, 8, 3))
    assert again.cost.one(20, 8, 3) == same, "the machine is the same"


def test_planner_best_plan_by_batch_size() -> None:
    """Requests share what a step costs whatever it holds: more of them bring more tokens, and rows
    that cost more are verified less.
    """
    server = MadeUpServer(8)
    planner = Planner(DEPTH, Survival(DEPTH))
    assert planner.best_plan_by_batch_size({8: server.tiers()}) == []
    server.serve(planner, 300)
    tiers = {b: list(range(b, b * (DEPTH + 1) + 1)) for b in (1, 8, 16)}
    told = planner.best_plan_by_batch_size(tiers)
    assert {(one["requests"], one["layers"]) for one in told} == {
        (b, d) for b in (1, 8, 16) for d in range(1, DEPTH + 1)
    }
    planner.report()
    assert planner.best_plan_by_batch_size(tiers) == told, (
        "it had not learnt from all that was there"
    )
    best = {
        b: max(one["tokens"] / one["milliseconds"] for one in told if one["requests"] == b)
        for b in (1, 8, 16)
    }
    assert best[1] < best[8] < best[16]
    _, rate = server.serve(planner, 300)
    assert best[8] == pytest.approx(rate, rel=0.15)
    assert json.dumps(planner.report() | {"plans": told})


@pytest.mark.parametrize("kind", [Survival, OneSlope])
def test_planner_learns_constrained_requests_apart(kind: type) -> None:
    """Whatever becomes of their drafts; and of these it knows what became of them."""
    alone, mixed = (Planner(DEPTH, kind(DEPTH)) for _ in range(2))
    server = MadeUpServer(4)
    for _ in range(3 * OneSlope.EVERY):
        chains, correct = server.chains(4), server.rng.integers(0, DEPTH + 1, 4)
        for planner in (alone, mixed):
            planner.learn(outcome(chains, np.full(4, DEPTH), correct))
        rejected = server.chains(7), np.full(7, DEPTH), np.zeros(7)
        mixed.learn(outcome(*rejected, constrained=True))
        for planner in (alone, mixed):
            planner.catch_up()  # as early, or predictions are of other ages
    reports = [{**planner.report(), "constrained": None} for planner in (alone, mixed)]
    assert reports[0] == reports[1]
    chains = server.chains(20)
    free = alone.free.survivals(chains)
    assert mixed.free.survivals(chains).tolist() == free.tolist()
    assert mixed.constrained.survivals(chains).mean() < 0.5 * free.mean()
    view = BatchView(4, range(4, 25), range(1, DEPTH + 1))
    expected = [planner._expected(view) for planner in (alone, mixed)]
    assert expected[0].tolist() == expected[1].tolist()
    both = mixed._expected(replace(view, num_constrained=2))
    assert both.mean() < expected[1].mean()

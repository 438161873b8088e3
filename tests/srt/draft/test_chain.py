"""Drafting chains of several lengths: which graphs there are, and what a shorter step gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.plan.fixed import FixedPlanner
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import StepKind, StepPlan
from sglang_c2t.plan.survival import Survival
from sglang_c2t.policies import build_policy
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.srt.draft import chain, extend
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.draft.selection import ChainSelector
from sglang_c2t.srt.draft.watcher import DraftWatcher
from sglang_c2t.srt.probes import attribute_names
from tests.doubles import double, invented, real_class
from tests.srt.chains import full_chains

STEPS, BATCH, VOCAB = 6, 3, 8


class Graphs:
    """Stands in for SGLang's runner of captured graphs, and remembers what it was made of."""

    def __init__(
        self, worker: Any, *, draft_attn_backend: Any = None, speculative_num_steps: int = STEPS
    ) -> None:
        self.speculative_num_steps = speculative_num_steps
        self.backend = draft_attn_backend
        assert worker.speculative_num_steps == speculative_num_steps
        assert not worker._reads_host
        assert worker.draft_attn_backend is draft_attn_backend or draft_attn_backend is None
        self.draft_forward = worker.draft_forward

    def execute(self, forward_batch: Any) -> Any:
        return self.draft_forward(forward_batch)


class StockWorker:
    """What SGLang's draft worker does, as far as the number of layers goes."""

    topk = 1
    device = "cpu"

    def __init__(self) -> None:
        self.speculative_num_steps = STEPS
        self.speculative_num_draft_tokens = STEPS + 1
        self.draft_runner = double("ModelRunner", forward=self.forward, attn_backend="stock extend")
        self.draft_runner.draft_attn_backend = "stock"  # the worker gives it to its runner
        self.draft_attn_backend: Any = "stock"
        self.draft_extend_attn_backend = "stock extend"
        self.cuda_graph_runner: Any = None
        self.layers_run = 0
        self.built: list[dict[str, Any]] = []

    def alloc_memory_pool(self) -> None:
        self.req_to_token_pool = double("ReqToTokenPool", req_to_token=torch.zeros(8, 16))

    def init_attention_backend(self) -> None:
        self.draft_attn_backend = f"{self.speculative_num_steps} steps"
        self.draft_extend_attn_backend = "another"
        self.draft_runner.draft_attn_backend = self.draft_attn_backend
        self.draft_runner.attn_backend = "another"

    def _capture_cuda_graphs(self) -> None:
        self.cuda_graph_runner = Graphs(self)

    def forward(self, forward_batch: Any) -> Any:
        self.layers_run += 1
        logits = torch.zeros(BATCH, VOCAB)
        output = double("LogitsProcessorOutput", next_token_logits=logits, hidden_states=None)
        return double(
            "sglang.srt.model_executor.model_runner.ModelRunnerOutput", logits_output=output
        )

    def _draft_extend_for_decode(self, batch: Any) -> None:
        self.draft_runner.forward(batch)

    def draft(self, batch: Any) -> Any:
        from sglang.srt.speculative import eagle_worker_v2

        runner = self.cuda_graph_runner
        run = self.draft_forward if runner is None else runner.execute
        given = ["sampling_info", "forward_mode", "req_pool_indices", "seq_lens"]
        fields = {name: getattr(batch, name) for name in [*given, "spec_info"]}
        parents, scores, tokens, _ = run(double("ForwardBatch", batch_size=BATCH, **fields))
        drafts = self.speculative_num_draft_tokens - 1
        assert parents.shape == scores.shape == tokens.shape == (BATCH, drafts)
        return eagle_worker_v2.build_eagle_verify_input(
            tokens, num_steps=self.speculative_num_steps
        )

    def draft_forward(self, forward_batch: Any) -> Any:
        tokens = []
        for step in range(self.speculative_num_steps):
            tokens.append(torch.full((BATCH, 1), 7))
            if step == self.speculative_num_steps - 1:
                break
            self.draft_runner.forward(forward_batch)
        parents = torch.zeros(BATCH, STEPS)
        return parents, parents, torch.cat(tokens, dim=1), None


def built(tokens: torch.Tensor, *, num_steps: int) -> Any:
    """SGLang's verify input of full chains, behind roots 0."""
    rows = torch.nn.functional.pad(tokens, (1, 0)).flatten()
    return full_chains(len(tokens), num_steps + 1, draft_token=rows)


class Planned(Planner):
    """Plans what a test says, and remembers what it is asked."""

    def __init__(self) -> None:
        super().__init__(STEPS, Survival(STEPS))
        self.next = StepPlan(StepKind.PLANNED, STEPS, 1, BATCH * (STEPS + 1))
        self.records: list[Any] = []

    def plan(self, batch: Any) -> StepPlan:
        return self.next

    def learn(self, record: Any) -> None:
        self.records.append(record)


def made(monkeypatch: pytest.MonkeyPatch, planner: Planner | None) -> Any:
    """Ours over the stand-in, before anything is captured."""
    monkeypatch.setattr(chain.eagle_worker_v2, "build_eagle_verify_input", built)
    stock = type("Stock", (StockWorker, chain.EagleDraftWorker), {})
    worker: Any = type("Worker", (chain.ChainDraftMixin, stock), {})()
    policy = Fixed() if planner is None else build_policy(C2TConfig(policy="auto"))
    worker.watch(lambda **relay: ChainGate(policy, **relay), None)
    worker.alloc_memory_pool()
    worker.packed = planner is not None
    options: Any = {"tiers": lambda: None, "width": STEPS + 1, "device": "cpu"}
    worker.gating = worker.planning = Planning(FixedPlanner(STEPS, 1, STEPS + 1), None, **options)
    if planner is not None:
        selector = ChainSelector(planner, width=STEPS + 1, slots=8, device="cpu")
        worker.planning = Planning(planner, selector, **options)
    return worker


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its graphs are captured, and its gate keeps every token."""
    worker = made(monkeypatch, None)
    worker._capture_cuda_graphs()
    return worker


@pytest.fixture
def planner() -> Planned:
    return Planned()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, planner: Planned) -> Any:
    """Without graphs."""
    return made(monkeypatch, planner)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, planner: Planned) -> Any:
    """With graphs of every number of layers."""
    worker = made(monkeypatch, planner)
    worker._capture_cuda_graphs()
    return worker


def batch(greedy: bool = True) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return double(
        "ScheduleBatch",
        reqs=[double("Req", origin_input_ids=[1], output_ids=[])] * BATCH,
        sampling_info=double("SamplingBatchInfo", is_all_greedy=greedy),
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(BATCH),
        seq_lens=torch.ones(BATCH),
        spec_info=double("sglang.srt.speculative.eagle_info.EagleDraftInput"),
    )


def test_the_worker_stood_in_for_has_nothing_that_sglangs_has_not() -> None:
    assert invented(StockWorker(), "EagleDraftWorker") == {"forward", "layers_run", "built"}


def test_graphs_are_captured_for_every_number_of_layers_that_a_planner_may_choose(
    captured: Any, worker: Any
) -> None:
    """Each with an attention of its own; SGLang's stays. None for a gate, which drafts all."""
    graphs = {
        layers: length.cuda_graph_runner for layers, length in captured.lengths.shorter.items()
    }
    assert sorted(graphs) == [1, 2, 3, 4, 5]  # all six are SGLang's own
    assert graphs.pop(1) is None  # draft extend has made that token already
    assert {n: of.backend for n, of in graphs.items()} == {n: f"{n} steps" for n in range(2, 6)}
    assert captured.draft_attn_backend == captured.draft_runner.draft_attn_backend == "stock"
    extend_backends = captured.draft_extend_attn_backend, captured.draft_runner.attn_backend
    assert extend_backends == ("stock extend", "stock extend")
    assert sorted(worker.lengths.shorter) == [1]


@pytest.mark.parametrize("layers", [1, 2, 4, 6])
@pytest.mark.parametrize("kind", [StepKind.PLANNED, StepKind.EXPLORE, StepKind.UNIFORM])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_drafts_as_many_layers_as_planned_and_still_builds_full_chains(
    request: pytest.FixtureRequest, planner: Planned, layers: int, kind: StepKind, graphs: bool
) -> None:
    worker = request.getfixturevalue("captured" if graphs else "planned")
    planner.next = StepPlan(kind, layers, 1, BATCH * (layers + 1))
    worker.layers_run = 0
    verify_input = worker.draft(batch())
    assert worker.layers_run == layers - 1
    tokens = [0, *[7] * layers, *[0] * (STEPS - layers)]
    assert verify_input.draft_token.tolist() == tokens * BATCH
    assert verify_input.num_rows.tolist() == [layers + 1] * BATCH
    assert verify_input.step.plan == planner.next
    assert verify_input.packing.total == BATCH * (layers + 1)
    assert worker.speculative_num_steps == verify_input.spec_steps == STEPS  # only for that step


def test_a_uniform_step_asks_no_gate_where_no_graph_holds_one(
    planned: Any, planner: Planned
) -> None:
    planned.gate.observe = planned.gate.begin = None  # must not be called
    planner.next = StepPlan(StepKind.UNIFORM, 3, 1, BATCH * 4)
    assert planned.draft(batch()).num_rows.tolist() == [4] * BATCH


@pytest.mark.parametrize("graphs", [False, True])
def test_first_tokens_after_uniform_steps_are_scored_once_a_step_reads_them(
    request: pytest.FixtureRequest, planner: Planned, graphs: bool
) -> None:
    """Those after the last one. A graph scores every step, so that its first tokens always are."""
    worker, measured = request.getfixturevalue("captured" if graphs else "planned"), []
    relay = worker.gate._judge_first
    worker.gate._judge_first = lambda slots, *more: (
        measured.append(slots.tolist()), relay(slots, *more)
    )  # fmt: skip

    def serve(kind: StepKind) -> None:
        planner.next = StepPlan(kind, 1, 1, 2 * BATCH)
        running = batch()
        running.spec_info = worker.draft(running)
        DraftWatcher._draft_extend_for_decode(worker, running)

    for _ in range(3):
        serve(StepKind.UNIFORM)
    assert len(measured) == (3 if graphs else 0)
    serve(StepKind.PLANNED)
    assert measured[-1] == [*range(BATCH)]
    assert len(measured) == (4 if graphs else 2)


def test_lengths_of_a_step_outlive_the_next_step(planned: Any, planner: Planned) -> None:
    """The scheduler may still be reading them."""
    found = []
    for layers in (4, 2):
        planner.next = StepPlan(StepKind.PLANNED, layers, 1, BATCH * (layers + 1))
        found.append(planned.draft(batch()))
    assert [each.num_rows.tolist() for each in found] == [[5] * BATCH, [3] * BATCH]


def test_a_recorded_step_drafts_all_layers_eagerly(captured: Any, planner: Planned) -> None:
    planner.next = StepPlan(StepKind.PLANNED, 2, 1, BATCH * 3)
    captured.gate.exploring = True
    captured.cuda_graph_runner.execute = None  # must not be called
    captured.layers_run = 0
    verify_input = captured.draft(batch())
    assert verify_input.step.plan.kind is StepKind.FIXED
    assert verify_input.num_rows.tolist() == [STEPS + 1] * BATCH
    assert captured.layers_run == STEPS - 1


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_the_first_rows_of_each_request_are_kept(longest: int) -> None:
    values = torch.arange(24).view(12, 2)  # three requests of four rows
    expected = [row.tolist() for first in (0, 4, 8) for row in values[first : first + longest]]
    assert extend.first_rows(values, requests=3, longest=longest).tolist() == expected
    assert extend.first_rows(None, requests=3, longest=longest) is None


def test_of_requests_that_arrive_from_another_server_only_what_they_asked_for_is_known(
    planned: Any,
) -> None:
    """A measurement that waited is of the request that had the slot before."""
    slots = torch.arange(BATCH)
    planned.gate.relay_first_token(slots, torch.zeros(BATCH, VOCAB), later=True)
    planned.arrive(arriving(1, 2))
    assert planned.gate.first_tokens.judged(slots).prob[0].tolist() == [0.125, 1, 1]
    assert planned.gate.opt_outs.whole(slots).tolist() == [False, False, True]
    for unmeasured in ([1, 2], []):
        running = batch()
        running.reqs = [request(slot) for slot in range(BATCH)]
        step = planned.draft(running).step
        assert step.unmeasured == unmeasured
        assert step.full == [2]


def test_first_layers_that_another_policy_scored_are_forgotten_and_teach_nothing(
    worker: Any, planner: Planned
) -> None:
    """A confidence of ``fixed`` is a depth, and one of ``entropy`` an entropy."""
    slots = torch.arange(BATCH)
    worker.gate.join(slots, torch.zeros(BATCH, VOCAB))
    assert worker.gate.first_tokens.judged(slots).confidence[0].tolist() == [-1] * 3
    worker.gate.switch(build_policy(C2TConfig(policy="auto")), captured=False)
    worker.cuda_graph_runner = None
    selector = ChainSelector(planner, width=STEPS + 1, slots=8, device="cpu")
    worker.planning = Planning(planner, selector, tiers=lambda: None, width=STEPS + 1, device="cpu")
    worker.forget_first_layers()
    for unmeasured in ([*range(BATCH)], []):
        running = batch()
        running.reqs = [request(slot) for slot in range(BATCH)]
        assert worker.draft(running).step.unmeasured == unmeasured
        assert worker.gate.first_tokens.judged(slots).confidence[0].tolist() == [1.0] * 3


def request(slot: int) -> Any:
    """That of slot 2 opted out."""
    asked = double("SamplingParams", custom_params={"c2t": slot in (0, 1)})
    at = {"origin_input_ids": [1], "output_ids": [], "sampling_params": asked}
    made = double("Req", custom_logit_processor=None, **at)
    if "req_pool_idx" in attribute_names(real_class("Req")):  # older SGLang
        made.req_pool_idx = slot
    else:
        made.kv = SimpleNamespace(req_pool_idx=slot)
    return made


def arriving(*slots: int) -> Any:
    return double(
        "ScheduleBatch",
        reqs=[request(slot) for slot in slots],
        req_pool_indices=torch.tensor(slots),
    )

"""Drafting chains of several lengths: which graphs there are, and what a shorter step gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.plan.plan import Plan
from sglang_c2t.plan.planner import Choice, Planner
from sglang_c2t.plan.survival import Survival
from sglang_c2t.policies import build_policy
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.srt.draft import chain, plain
from sglang_c2t.srt.draft.planning import Planning
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
        fields = {name: getattr(batch, name) for name in given}
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


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours over the stand-in, its graphs captured; keeps every token."""
    monkeypatch.setattr(chain.eagle_worker_v2, "build_eagle_verify_input", built)
    stock = type("Stock", (StockWorker, chain.EagleDraftWorker), {})
    made: Any = type("Worker", (chain.ChainDraftMixin, stock), {})()
    made.watch(lambda **relay: ChainGate(Fixed(), **relay), None)
    made.alloc_memory_pool()
    made._capture_cuda_graphs()
    return made


def batch(greedy: bool = True) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return double(
        "ScheduleBatch",
        reqs=[double("Req", origin_input_ids=[1], output_ids=[])] * BATCH,
        sampling_info=double("SamplingBatchInfo", is_all_greedy=greedy),
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(BATCH),
        seq_lens=torch.ones(BATCH),
    )


def test_the_worker_stood_in_for_has_nothing_that_sglangs_has_not() -> None:
    assert invented(StockWorker(), "EagleDraftWorker") == {"forward", "layers_run", "built"}


def test_graphs_are_captured_for_a_third_two_thirds_and_all_layers(worker: Any) -> None:
    """Each with an attention of its own; SGLang's stays."""
    captured = {steps: graphs.cuda_graph_runner for steps, graphs in worker._graphs.items()}
    assert sorted(captured) == [1, 2, 4]  # all six are SGLang's own
    assert captured.pop(1) is None  # draft extend has made that token already
    assert {s: graphs.backend for s, graphs in captured.items()} == {2: "2 steps", 4: "4 steps"}
    assert worker.draft_attn_backend == worker.draft_runner.draft_attn_backend == "stock"
    assert worker.draft_extend_attn_backend == worker.draft_runner.attn_backend == "stock extend"
    assert worker.depth.steps == STEPS


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_a_shorter_step_runs_fewer_layers_and_still_builds_full_chains(
    worker: Any, steps: int
) -> None:
    worker.depth.steps = steps
    worker.layers_run = 0
    verify_input = worker.draft(batch())
    assert worker.layers_run == steps - 1
    assert verify_input.spec_steps == STEPS
    assert verify_input.draft_token.tolist() == [0, *[7] * steps, *[0] * (STEPS - steps)] * BATCH
    assert verify_input.num_rows.tolist() == [steps + 1] * BATCH
    assert worker.drafted_rows == steps + 1
    assert worker.speculative_num_steps == STEPS  # only for that step


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
@pytest.mark.parametrize("reason", ["plan", "explore"])
def test_a_planned_step_drafts_as_many_layers_as_planned(
    worker: Any, steps: int, reason: str
) -> None:
    planner = Planner(STEPS, Survival(STEPS))
    plan = Plan(steps, BATCH * (STEPS + 1), 1.0, 1.0)
    planner.choose = lambda *_, **__: Choice(plan, reason)  # type: ignore[method-assign]
    policy = build_policy(C2TConfig(policy="auto"))
    worker.gate = ChainGate(policy, num_slots=8, device="cpu")
    worker.gate.planned, worker.cuda_graph_runner = True, None
    worker.planning = Planning(planner, tiers=lambda: None, width=STEPS + 1, slots=8, device="cpu")
    worker.layers_run = 0
    verify_input = worker.draft(batch())
    assert worker.layers_run == steps - 1
    assert verify_input.draft_token.tolist() == [0, *[7] * steps, *[0] * (STEPS - steps)] * BATCH
    assert worker.drafted_rows == steps + 1
    assert worker.speculative_num_steps == verify_input.spec_steps == STEPS


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_plain_step_asks_no_gate_and_verifies_all_it_drafts(
    worker: Any, steps: int, greedy: bool
) -> None:
    """As a server of so many drafts would; where requests sample, as planned steps do."""
    planner = Planner(STEPS, Survival(STEPS))
    plan = Plan(steps, BATCH * (steps + 1), 1.0, 1.0)
    planner.plain_step = lambda _: Choice(plan, "plain")  # type: ignore[method-assign]
    worker.gate = ChainGate(build_policy(C2TConfig(policy="auto")), num_slots=8, device="cpu")
    worker.gate.observe = None  # must not be called
    worker.gate.planned, worker.cuda_graph_runner = True, None
    worker.planning = Planning(planner, tiers=lambda: None, width=STEPS + 1, slots=8, device="cpu")
    worker.layers_run = 0
    verify_input = worker.draft(batch(greedy))
    assert worker.layers_run == steps - 1
    drafts = steps if greedy else STEPS
    assert verify_input.spec_steps == drafts
    assert (verify_input.packing is None) == greedy
    assert verify_input.draft_token.tolist() == [0, *[7] * steps, *[0] * (drafts - steps)] * BATCH
    assert verify_input.num_rows.tolist() == [steps + 1] * BATCH
    assert worker.drafted_rows == steps + 1


def test_first_tokens_behind_plain_steps_are_measured_once_a_step_asks_for_them(
    worker: Any,
) -> None:
    """Those behind the last one; steps that are not plain have theirs measured at once."""
    planner = Planner(STEPS, Survival(STEPS))
    plan, measured = Plan(1, 2 * BATCH, 1.0, 1.0), []
    planner.plain_step = lambda _: Choice(plan, "plain")  # type: ignore[method-assign]
    planner.choose = lambda *_, **__: Choice(plan, "plan")  # type: ignore[method-assign]
    worker.gate = ChainGate(build_policy(C2TConfig(policy="auto")), num_slots=8, device="cpu")
    worker.gate.planned, worker.cuda_graph_runner = True, None
    relay = worker.gate.relay_first_token
    worker.gate.relay_first_token = lambda slots, *output: (
        measured.append(slots.tolist()), relay(slots, *output)
    )  # fmt: skip
    worker.planning = Planning(planner, tiers=lambda: None, width=STEPS + 1, slots=8, device="cpu")
    for _ in range(3):
        worker.draft(batch())
        DraftWatcher._draft_extend_for_decode(worker, batch())
    assert measured == []
    planner.plain_step = lambda _: None  # type: ignore[method-assign]
    worker.draft(batch())
    assert measured == [[*range(BATCH)]]
    DraftWatcher._draft_extend_for_decode(worker, batch())
    assert len(measured) == 2
    worker.draft(batch())
    assert len(measured) == 2


def test_lengths_of_a_step_outlive_the_next_step(worker: Any) -> None:
    """The scheduler may still be reading them."""
    worker.depth.steps = 4
    before = worker.draft(batch())
    worker.depth.steps = 2
    after = worker.draft(batch())
    assert before.num_rows.tolist() == [5] * BATCH
    assert after.num_rows.tolist() == [3] * BATCH


def test_a_recorded_step_drafts_all_layers_eagerly(worker: Any) -> None:
    worker.depth.steps = 2
    worker.gate.exploring = True
    worker.cuda_graph_runner.execute = None  # must not be called
    worker.layers_run = 0
    assert worker.draft(batch()).draft_token.shape == (BATCH * (STEPS + 1),)
    assert worker.layers_run == STEPS - 1


def test_no_other_lengths_are_captured_if_so_configured() -> None:
    assert chain._choices(None, 6) == [2, 4, 6]
    assert chain._choices(None, 1) == [1]
    assert chain._choices((), 6) == [6]
    assert chain._choices((3, 9), 6) == [3, 6]


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_the_first_rows_of_each_request_are_kept(longest: int) -> None:
    values = torch.arange(24).view(12, 2)  # three requests of four rows
    expected = [row.tolist() for first in (0, 4, 8) for row in values[first : first + longest]]
    assert plain.first_rows(values, requests=3, longest=longest).tolist() == expected
    assert plain.first_rows(None, requests=3, longest=longest) is None


def test_of_requests_that_arrive_from_another_server_nothing_is_known_but_what_they_asked(
    worker: Any,
) -> None:
    """Not even by a measurement that waited: it was of who had the slot before."""
    planner = Planner(STEPS, Survival(STEPS))
    plan = Plan(STEPS, BATCH * (STEPS + 1), 1.0, 1.0)
    planner.choose = lambda *_, **__: Choice(plan, "plan")  # type: ignore[method-assign]
    worker.gate = ChainGate(build_policy(C2TConfig(policy="auto")), num_slots=8, device="cpu")
    worker.gate.planned, worker.cuda_graph_runner = True, None
    worker.planning = Planning(planner, tiers=lambda: None, width=STEPS + 1, slots=8, device="cpu")
    worker._to_relay = lambda: worker.gate.join(torch.arange(BATCH), torch.zeros(BATCH, VOCAB))
    worker.arrive(arriving(1, 2))
    assert worker.gate.first_tokens.judged(torch.arange(BATCH)).prob[0].tolist() == [0.125, 1, 1]
    assert worker.gate.opt_outs.whole(torch.arange(BATCH)).tolist() == [False, False, True]
    running = batch()
    running.reqs = [request(slot) for slot in range(BATCH)]
    worker.draft(running)
    assert worker.planning.unmeasured == [1, 2]
    worker.draft(running)
    assert worker.planning.unmeasured == []


def test_first_tokens_that_another_policy_judged_are_forgotten_and_teach_nothing(
    worker: Any,
) -> None:
    """A confidence of ``fixed`` is a depth, and one of ``entropy`` an entropy."""
    planner = Planner(STEPS, Survival(STEPS))
    plan = Plan(STEPS, BATCH * (STEPS + 1), 1.0, 1.0)
    firsts: list[Any] = []

    def choose(first: Any, *_: Any, **__: Any) -> Choice:
        firsts.append(first.tolist())
        return Choice(plan, "plan")

    planner.choose = choose  # type: ignore[method-assign]
    fixed = build_policy(C2TConfig(policy="fixed"))
    worker.gate = ChainGate(fixed, num_slots=8, device="cpu")
    worker.gate.join(torch.arange(BATCH), torch.zeros(BATCH, VOCAB))
    assert worker.gate.first_tokens.judged(torch.arange(BATCH)).confidence[0].tolist() == [-1] * 3
    worker.gate.switch(build_policy(C2TConfig(policy="auto")), captured=False)
    worker.gate.planned, worker.cuda_graph_runner = True, None
    worker.planning = Planning(planner, tiers=lambda: None, width=STEPS + 1, slots=8, device="cpu")
    worker.judge_anew()
    running = batch()
    running.reqs = [request(slot) for slot in range(BATCH)]
    worker.draft(running)
    assert firsts == [[1.0] * BATCH]
    assert worker.planning.unmeasured == [*range(BATCH)]
    worker.draft(running)
    assert worker.planning.unmeasured == []


def test_a_step_is_not_timed_until_requests_come_to_an_idle_server(worker: Any) -> None:
    interrupted: list[None] = []
    worker.planning = double(Planning)
    worker.planning.interrupted = lambda: interrupted.append(None)
    plan = Plan(1, BATCH, 1.0, 1.0)
    worker.planning.begin = lambda *_, **__: Choice(plan, "plan")
    worker.planning.whole_drafts = lambda: plan
    running = batch()
    running.reqs = [request(slot) for slot in range(BATCH)]
    for slots, times in (((0,), 0), ((), 0), (range(BATCH), 1)):
        if slots:
            worker.arrive(arriving(*slots))
        worker._begin_planned(running, worker.planning)
        assert len(interrupted) == times


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

"""Replacements in SGLang's draft worker: numbers of layers, their graphs, and draft extend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.speculative import eagle_worker_v2

from sglang_c2t.plan.step import StepKind
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.srt.draft.workers import C2TEagleDraftWorker
from tests.doubles import double, invented
from tests.srt.chains import full_chains
from tests.srt.draft.fake_host import BATCH, STEPS, VOCAB, FakeHost, Planned, batch_of
from tests.srt.draft.test_drafter import chains


class Graphs:
    """Stands in for SGLang's runner of captured graphs, and remembers what it was made of."""

    def __init__(
        self, worker: Any, *, draft_attn_backend: Any = None, speculative_num_steps: int = STEPS
    ) -> None:
        self.speculative_num_steps = speculative_num_steps
        self.backend = draft_attn_backend
        assert worker.speculative_num_steps == speculative_num_steps
        assert worker.drafter.host.capturing
        assert worker.draft_attn_backend is draft_attn_backend or draft_attn_backend is None
        self.draft_forward = worker.draft_forward

    def execute(self, forward_batch: Any) -> Any:
        return self.draft_forward(forward_batch)


class StockWorker:
    """A draft worker of SGLang, as far as the number of layers goes."""

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
        self.server_args: Any = None
        self.layers_run = 0
        self.extended: list[Any] = []

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

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
        self.extended.append((batch_result.next_token_ids.tolist(), batch.out_cache_loc.tolist()))
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


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes ours over the stand-in, of a gate that keeps every token or with a planner."""
    monkeypatch.setattr(eagle_worker_v2, "build_eagle_verify_input", built)
    stock = type("Stock", (StockWorker, eagle_worker_v2.EagleDraftWorker), {})

    def make(planner: Planned | None, *, graphs: bool) -> Any:
        worker: Any = type("Worker", (C2TEagleDraftWorker, stock), {})()
        worker.make_drafter = lambda host: chains(host, None if planner else Fixed(), planner)
        worker.alloc_memory_pool()
        if graphs:
            worker._capture_cuda_graphs()
        worker.layers_run = 0
        return worker

    return make


def test_stock_worker_double_has_no_attribute_of_its_own() -> None:
    assert invented(StockWorker(), "EagleDraftWorker") == {"forward", "layers_run", "extended"}


def test_host_captures_cuda_graphs_for_every_number_of_layers(
    make: Any,
) -> None:
    """Each with an attention of its own; SGLang's stays. None for a gate, which drafts all."""
    worker = make(Planned(), graphs=True)
    shorter = worker.drafter.host.lengths.shorter
    graphs = {layers: length.cuda_graph_runner for layers, length in shorter.items()}
    assert sorted(graphs) == [1, 2, 3, 4, 5]  # all six are SGLang's own
    assert graphs.pop(1) is None  # draft extend has made that token already
    assert {n: of.backend for n, of in graphs.items()} == {n: f"{n} steps" for n in range(2, 6)}
    assert worker.draft_attn_backend == worker.draft_runner.draft_attn_backend == "stock"
    extend_backends = worker.draft_extend_attn_backend, worker.draft_runner.attn_backend
    assert extend_backends == ("stock extend", "stock extend")
    assert sorted(make(None, graphs=True).drafter.host.lengths.shorter) == [1]


@pytest.mark.parametrize("layers", [1, 2, 4, 6])
@pytest.mark.parametrize("kind", [StepKind.PLANNED, StepKind.EXPLORE, StepKind.UNIFORM])
@pytest.mark.parametrize("graphs", [False, True])
def test_host_shorter_step_builds_full_chains(
    make: Any, layers: int, kind: StepKind, graphs: bool
) -> None:
    planner, fake = Planned(), FakeHost()
    planner.says(kind, layers)
    worker = make(planner, graphs=graphs)
    verify_input = worker.draft(batch_of(*range(BATCH)))
    tokens = [0, *[7] * layers, *[0] * (STEPS - layers)]
    assert verify_input.draft_token.tolist() == tokens * BATCH
    assert verify_input.packing.total == BATCH * (layers + 1)
    assert verify_input.step.plan == planner.next
    assert worker.speculative_num_steps == verify_input.spec_steps == STEPS  # only for that step
    faked = fake.step(chains(fake, None, planner), batch_of(*range(BATCH)))
    assert (fake.asked, fake.layers_run) == ([(layers, False)], [worker.layers_run])
    assert faked.num_rows.tolist() == verify_input.num_rows.tolist() == [layers + 1] * BATCH
    assert faked.draft_token.shape == verify_input.draft_token.shape


def test_host_recorded_step_drafts_all_layers_eagerly(make: Any) -> None:
    planner = Planned()
    planner.says(StepKind.PLANNED, 2)
    worker = make(planner, graphs=True)
    worker.drafter.gate.exploring = True
    worker.cuda_graph_runner.execute = None  # must not be called
    verify_input = worker.draft(batch_of(*range(BATCH)))
    assert verify_input.step.plan.kind is StepKind.FIXED
    assert verify_input.num_rows.tolist() == [STEPS + 1] * BATCH
    assert worker.layers_run == STEPS - 1


@pytest.mark.parametrize("lens", [[1, 1, 1], [2, 1, 4]])
def test_host_draft_extend_on_a_cpu_covers_the_longest_request(make: Any, lens: list[int]) -> None:
    """SGLang's worker covers N of each request."""
    worker, running = make(None, graphs=False), batch_of(*range(BATCH))
    rows = running.out_cache_loc = torch.arange(BATCH * (STEPS + 1))
    output = double("LogitsProcessorOutput", hidden_states=None)
    given: Any = {"accept_lens": torch.tensor(lens), "next_token_ids": rows}
    result = double("GenerationBatchResult", logits_output=output, **given)
    worker._draft_extend_for_decode(running, result)
    first = rows.view(BATCH, -1)[:, : max(lens)].flatten().tolist()
    assert worker.extended == [(first, first)]
    assert running.out_cache_loc is rows
    assert worker.speculative_num_draft_tokens == STEPS + 1

"""A double of SGLang's draft worker below our own, which drafts at random, and batches for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import StepKind, StepPlan
from sglang_c2t.plan.survival import Survival
from sglang_c2t.srt.draft.workers import C2TEagleDraftWorker
from sglang_c2t.srt.probes import attribute_names
from tests.doubles import double, real_class
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
        assert worker.drafter.host.capturing
        assert worker.draft_attn_backend is draft_attn_backend or draft_attn_backend is None
        self.draft_forward = worker.draft_forward

    def execute(self, forward_batch: Any) -> Any:
        return self.draft_forward(forward_batch)


class StockWorker:
    """A draft worker of SGLang: graphs, attention backends, and the draft loop.

    ``layers_run`` counts the draft forwards of each loop.
    """

    device = "cpu"
    hot_token_id = plan_stream = None

    def __init__(self, topk: int = 1, num_steps: int = STEPS) -> None:
        self.topk, self.speculative_num_steps = topk, num_steps
        self.speculative_num_draft_tokens = STEPS + 1
        self.draft_runner = double("ModelRunner", forward=self.forward, attn_backend="stock extend")
        self.draft_runner.draft_attn_backend = "stock"  # the worker gives it to its runner
        self.draft_attn_backend: Any = "stock"
        self.draft_extend_attn_backend = "stock extend"
        self.cuda_graph_runner: Any = None
        self.server_args: Any = None
        self.layers_run: list[int] = []
        self.extended: list[Any] = []
        self.num_logits = 0

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
        self.layers_run[-1] += 1
        logits, hidden = torch.randn(len(forward_batch.input_ids), VOCAB), None
        if isinstance(forward_batch.spec_info, EagleDraftExtendInput):
            numbers = torch.arange(len(forward_batch.input_ids))
            hidden = numbers[:, None].float().expand(-1, VOCAB)
            last = forward_batch.spec_info.select_index
            logits = hidden if last is None else hidden[last]
        output = double("LogitsProcessorOutput", next_token_logits=logits, hidden_states=hidden)
        return double(
            "sglang.srt.model_executor.model_runner.ModelRunnerOutput", logits_output=output
        )

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
        self.extended.append((batch_result.next_token_ids.tolist(), batch.out_cache_loc.tolist()))
        lens, tokens = batch_result.accept_lens, batch_result.next_token_ids
        select = torch.arange(len(lens)) * self.speculative_num_draft_tokens + lens - 1
        if prepared := getattr(batch_result, "prepared_draft_extend_inputs", None):
            num_correct_drafts, select, prepared_tokens = prepared
            assert num_correct_drafts.tolist() == (lens - 1).tolist()
            assert prepared_tokens.tolist() == tokens.tolist()
        counted, self.layers_run = self.layers_run, [0]
        extend: Any = double(EagleDraftExtendInput)
        forward_batch = double("ForwardBatch", spec_info=extend, input_ids=tokens)
        made = self.draft_runner.forward(forward_batch).logits_output
        self.layers_run, self.num_logits = counted, len(made.next_token_logits)
        made.next_token_logits = made.next_token_logits[select]
        made.hidden_states = made.hidden_states[select]

    def draft(self, batch: Any) -> Any:
        runner = self.cuda_graph_runner
        run = self.draft_forward if runner is None else runner.execute
        given = ["sampling_info", "forward_mode", "req_pool_indices", "seq_lens"]
        fields = {name: getattr(batch, name) for name in [*given, "spec_info"]}
        drafted = run(double("ForwardBatch", batch_size=BATCH, input_ids=None, **fields))
        if batch.forward_mode.is_idle():
            return None
        return eagle_worker_v2.build_eagle_verify_input(
            batch, batch.spec_info, *drafted, num_steps=self.speculative_num_steps
        )

    def draft_forward(self, forward_batch: Any) -> Any:
        self.layers_run.append(0)
        if self.topk > 1:
            return _draft_trees(self, forward_batch)
        for _ in range(self.speculative_num_steps - 1):
            forward_batch.input_ids = torch.zeros(BATCH, dtype=torch.int64)
            self.draft_runner.forward(forward_batch)
        parents = torch.zeros(BATCH, STEPS)
        return parents, parents, torch.full((BATCH, self.speculative_num_steps), 7), None


def _draft_trees(worker: Any, forward_batch: Any) -> Any:
    logits = torch.randn(BATCH, VOCAB)
    for layer in range(worker.speculative_num_steps):
        prob, token = logits.softmax(dim=1).topk(worker.topk)
        ids, *_ = eagle_worker_v2.select_top_k_tokens(layer, prob, token, None, None, worker.topk)
        if layer < worker.speculative_num_steps - 1:
            forward_batch.input_ids = ids
            output = worker.draft_runner.forward(forward_batch)
            logits = output.logits_output.next_token_logits
    return (*eagle_worker_v2.organize_draft_results(None, None, None, None), None)


def built(
    _batch: Any, _input: Any, parents: Any, scores: Any, tokens: Any, *_: Any, num_steps: int
) -> Any:
    """Make SGLang's verify input of full chains after roots 0."""
    assert parents.shape == scores.shape == tokens.shape == (BATCH, num_steps)
    rows = torch.nn.functional.pad(tokens, (1, 0)).flatten()
    return full_chains(len(tokens), num_steps + 1, draft_token=rows)


class Worker(C2TEagleDraftWorker):
    """Our draft worker over the double."""

    def step(self, batch: Any) -> Any:
        """Draft for a ``batch``, and extend the draft; returns the verify input."""
        batch.spec_info = verify_input = self.draft(batch)
        batch.out_cache_loc = rows = torch.arange(BATCH * (self.speculative_num_steps + 1))
        output = double("LogitsProcessorOutput", hidden_states=None)
        given: Any = {"accept_lens": torch.ones(BATCH, dtype=torch.int32), "next_token_ids": rows}
        result = double("GenerationBatchResult", logits_output=output, **given)
        self._draft_extend_for_decode(batch, result)
        return verify_input


class Planned(Planner):
    """Plans what a test says."""

    def __init__(self) -> None:
        super().__init__(STEPS, Survival(STEPS))
        self.says(StepKind.PLANNED, STEPS)

    def says(self, kind: StepKind, layers: int) -> None:
        """The next steps are of this kind and length, with rows for all drafts."""
        self.next = StepPlan(kind, layers, 1, BATCH * (layers + 1))

    def plan(self, batch: Any) -> StepPlan:
        return self.next

    def learn(self, record: Any) -> None:
        pass


def batch_of(*slots: int, mode: ForwardMode = ForwardMode.DECODE) -> Any:
    """A batch of the requests in these ``slots``; that of slot 5 opted out."""
    return double(
        "ScheduleBatch",
        reqs=[_request(slot) for slot in slots],
        sampling_info=double("SamplingBatchInfo", is_all_greedy=True),
        forward_mode=mode,
        req_pool_indices=torch.tensor(slots, dtype=torch.int64),
        seq_lens=torch.ones(len(slots), dtype=torch.int64),
        spec_info=double(
            "sglang.srt.speculative.eagle_info.EagleDraftInput",
            bonus_tokens=torch.zeros(len(slots), dtype=torch.int32),
            hidden_states=None,
        ),
    )


def _request(slot: int) -> Any:
    asked = double("SamplingParams", custom_params={"c2t": slot != 5})
    at = {"origin_input_ids": [1], "output_ids": [], "sampling_params": asked}
    made = double("Req", custom_logit_processor=None, **at)
    if "req_pool_idx" in attribute_names(real_class("Req")):  # older SGLang
        made.req_pool_idx = slot
    else:
        made.kv = SimpleNamespace(req_pool_idx=slot)
    return made

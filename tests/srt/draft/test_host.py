"""Replacements in SGLang's draft worker: numbers of layers, their graphs, and draft extend."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from sglang_c2t.plan.step import StepKind
from sglang_c2t.policies.fixed import Fixed
from tests.doubles import double, invented
from tests.srt.draft.stock_worker import BATCH, STEPS, Planned, StockWorker, batch_of
from tests.srt.draft.test_drafter import chains


@pytest.fixture
def make(make_worker: Any) -> Any:
    """Make a worker with a gate that keeps every token, or with a planner."""

    def made(planner: Planned | None, *, graphs: bool) -> Any:
        policy = None if planner else Fixed()
        return make_worker(lambda host: chains(host, policy, planner), graphs=graphs)

    return made


def test_stock_worker_double_has_no_attribute_of_its_own() -> None:
    assert invented(StockWorker(), "EagleDraftWorker") == {
        "forward",
        "layers_run",
        "extended",
        "num_logits",
    }


def test_host_captures_cuda_graphs_for_every_number_of_layers(make: Any) -> None:
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
    planner = Planned()
    planner.says(kind, layers)
    worker = make(planner, graphs=graphs)
    verify_input = worker.draft(batch_of(*range(BATCH)))
    tokens = [0, *[7] * layers, *[0] * (STEPS - layers)]
    assert verify_input.draft_token.tolist() == tokens * BATCH
    assert verify_input.packing.total == BATCH * (layers + 1)
    assert verify_input.step.plan == planner.next
    assert worker.speculative_num_steps == verify_input.spec_steps == STEPS  # only for that step
    assert worker.layers_run == [layers - 1]
    assert verify_input.num_rows.tolist() == [layers + 1] * BATCH


def test_host_recorded_step_drafts_all_layers_eagerly(make: Any) -> None:
    planner = Planned()
    planner.says(StepKind.PLANNED, 2)
    worker = make(planner, graphs=True)
    worker.drafter.gate.exploring = True
    worker.cuda_graph_runner.execute = None  # must not be called
    verify_input = worker.draft(batch_of(*range(BATCH)))
    assert verify_input.step.plan.kind is StepKind.FIXED
    assert verify_input.num_rows.tolist() == [STEPS + 1] * BATCH
    assert worker.layers_run == [STEPS - 1]


@pytest.mark.parametrize("lens", [[1, 1, 1], [2, 1, 4]])
def test_host_draft_extend_on_a_cpu_covers_the_longest_request(make: Any, lens: list[int]) -> None:
    """SGLang's worker covers N of each request."""
    worker, running = make(None, graphs=False), batch_of(*range(BATCH))
    rows = running.out_cache_loc = torch.arange(BATCH * (STEPS + 1))
    output = double("LogitsProcessorOutput", hidden_states=None)
    given: Any = {"accept_lens": torch.tensor(lens), "next_token_ids": rows}
    result = double("GenerationBatchResult", logits_output=output, **given)
    stock = partial(StockWorker._draft_extend_for_decode, worker)
    made = worker.drafter.host.extend(stock, running, result)
    last = [i * max(lens) + n - 1 for i, n in enumerate(lens)]
    assert [values[:, 0].tolist() for values in made] == [last, last]
    selects = hasattr(result, "prepared_draft_extend_inputs")  # SGLang 0.5.22 and later
    assert worker.num_logits == BATCH * (1 if selects else max(lens))
    first = rows.view(BATCH, -1)[:, : max(lens)].flatten().tolist()
    assert worker.extended == [(first, first)]
    assert running.out_cache_loc is rows
    assert worker.speculative_num_draft_tokens == STEPS + 1

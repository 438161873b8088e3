"""What the server remembers of a step for the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_c2t.plan.load import DraftDepth
from sglang_c2t.srt import seams
from sglang_c2t.srt.verify import feedback
from tests.doubles import double


def on_cpu(agree: Any = lambda tensor: tensor, **limits: Any) -> Any:
    return feedback.Feedback(False, agree, **limits)


def test_a_step_is_learnt_from_when_the_next_one_starts() -> None:
    memory, depth = on_cpu(), DraftDepth([2, 4], smoothing=1.0)
    memory.start(torch.tensor([1, 1]), depth)
    assert depth.steps == 4
    memory.start(torch.tensor([1, 1]), depth)
    assert depth.steps == 2


def test_a_step_is_learnt_from_with_the_depth_it_was_drafted_with() -> None:
    """Although another one has been chosen since."""
    memory, depth = on_cpu(), DraftDepth([2, 4], smoothing=1.0)
    memory.start(torch.tensor([5, 5]), depth)  # four layers, all alive
    depth.steps = 2
    memory.start(torch.tensor([3, 3]), depth)
    assert depth.steps == 4


def test_on_a_cpu_packing_always_pays() -> None:
    memory = on_cpu()
    memory.start(torch.tensor([6, 6]))
    memory.start(torch.tensor([6, 6]))
    assert memory.packs(2, 6)


def test_ranks_decide_by_what_they_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times differ between ranks; rank 0's count."""
    memory = on_cpu()
    monkeypatch.setattr(
        torch, "tensor", lambda data, dtype, device: torch.asarray(data, dtype=dtype)
    )
    memory._agree = lambda mine: torch.asarray([0.01, 0.5])
    memory._decide()
    memory._on_cuda, memory._rows_per_request = True, 2.0
    assert memory.packs(requests=64, width=6)  # 256 rows fewer: 2.6 ms against 0.5
    assert not memory.packs(requests=8, width=6)  # 32 rows fewer


def test_one_rank_asks_nobody_and_makes_no_trip_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = on_cpu(agree=None)
    monkeypatch.delattr(torch, "tensor")
    memory._rule.waited(0.5)
    memory._decide()
    assert memory._rule._decided_on == (0.0, 0.5)


class Event:
    """In place of ``torch.cuda.Event``: when it was recorded last, on a clock that ticks."""

    clock = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        self.at = Event.clock

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.mark.parametrize("captured", [True, False])
def test_a_forward_is_timed_from_where_the_device_begins_with_it(
    monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Before the replay of its graph the device idles for as long as the host prepares."""
    from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import (
        BaseCudaGraphBackend,
    )

    def work(*_args: Any) -> str:
        Event.clock += 7
        return "output"

    kind: Any = type("Backend", (BaseCudaGraphBackend,), {"replay": work})
    kind.__abstractmethods__ = frozenset()
    backend = kind()

    def forward(**_kwargs: Any) -> Any:
        Event.clock += 100  # the host prepares
        return backend.replay("key", None) if captured else work()

    graphs = double(seams.DECODE_GRAPHS + ".DecodeCudaGraphRunner", backend=backend)
    runner = double(
        "ModelRunner", device="cuda", decode_cuda_graph_runner=graphs if captured else None
    )
    worker = double("TpModelWorker", model_runner=runner, forward_batch_generation=forward)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    memory, took = feedback.Feedback(on_cuda=True), []
    monkeypatch.setattr(memory._rule, "forward_took", lambda *of: took.append(of))
    packing = SimpleNamespace(arrived=None, forwarded_rows=12)
    with memory.timing(worker, SimpleNamespace(packing=packing, forwarded_rows=12)):
        assert worker.forward_batch_generation(forward_batch=None) == "output"
    assert took == [(12, 7 if captured else 107)]
    assert worker.forward_batch_generation is forward
    assert backend.replay.__func__ is work  # as it was


def test_a_batch_that_would_exceed_its_limit_is_packed_whatever_it_costs() -> None:
    memory = on_cpu(max_rows=16)
    memory._on_cuda, memory._rows_per_request = True, 3.0
    memory._rule.decide_on(0.0, 1.0)
    assert not memory.packs(requests=4, width=4)
    assert memory.packs(requests=5, width=4)


def test_full_width_keeps_all_rows_and_still_learns() -> None:
    memory = on_cpu()
    packing = feedback.choose_packing(memory, torch.tensor([1, 3]), 4, packed=False)
    assert packing.host_rows.tolist() == [4, 4]
    assert packing.total == 8
    packed = feedback.choose_packing(memory, torch.tensor([1, 3]), 4)
    assert packed.host_rows.tolist() == [1, 3]
    assert memory._rows_per_request == 2.0

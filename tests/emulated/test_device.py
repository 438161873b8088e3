"""The emulated device computes what a CPU computes, and shows what a GPU only sometimes shows."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.emulated.device import DEVICE, DeviceTensor, Refused, launch
from tests.emulated.memory import Block
from tests.emulated.queues import Stream
from tests.emulated.torch_cuda import installed


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with installed():
        yield


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda")


# -- numbers ------------------------------------------------------------------------------

UNARY: list[Callable[[Tensor], Tensor]] = [
    lambda t: t + 1, lambda t: t * t, lambda t: t.flip(0), lambda t: t.t().contiguous(),
    lambda t: t.cumsum(0), lambda t: t[1:].repeat(2, 1)[: len(t)], lambda t: t.sort(0).values,
    lambda t: torch.where(t > 1, t, -t), lambda t: t.masked_fill(t > 2, 0.5),
    lambda t: t.clone().index_fill_(0, torch.tensor([0], device=t.device), 3.0),
    lambda t: torch.cat([t, t])[len(t) :], lambda t: t.softmax(1),
    lambda t: t.topk(2, 0).values[[0] * len(t)],
    lambda t: t.to(torch.int64).float(), lambda t: t.expand(2, *t.shape).sum(0) / 2,
    lambda t: t.view(-1).reshape(t.shape), lambda t: t.clone().fill_(2.0).add_(t),
    lambda t: torch.arange(len(t), device=t.device)[:, None] * t,
]  # fmt: skip


@given(st.lists(st.sampled_from(UNARY), max_size=8), st.integers(2, 4))
def test_a_program_computes_what_it_computes_on_the_host(
    program: list[Callable[[Tensor], Tensor]], size: int
) -> None:
    host = torch.rand(size, size)
    there = host.to("cuda")
    for step in program:
        host, there = step(host), step(there)
        assert there.shape == host.shape
        assert there.is_cuda
    assert torch.equal(there.cpu(), host)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_added_up_in_float32_or_better_and_rounded_once(dtype: torch.dtype) -> None:
    left, right = torch.rand(5, 300).to(dtype), torch.rand(300, 4).to(dtype)
    product = torch.matmul(left.cuda(), right.cuda()).cpu()
    assert product.dtype == dtype
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    assert torch.equal(product, (left.to(wide) @ right.to(wide)).to(dtype))


def test_shapes_that_are_data_are_waited_for() -> None:
    numbers = torch.tensor([3, 0, 5, 0]).to("cuda")
    before = DEVICE.tally["syncs"]
    assert numbers.nonzero().tolist() == [[0], [2]]
    assert numbers[numbers > 0].cpu().tolist() == [3, 5]
    assert int(numbers.sum()) == 8
    assert torch.repeat_interleave(torch.ones_like(numbers), numbers).shape == (8,)
    assert DEVICE.tally["syncs"] - before > 4


def test_a_mask_that_one_number_is_written_under_is_not_waited_for() -> None:
    numbers = zeros(4)
    before = DEVICE.tally["syncs"]
    numbers[numbers == 0] = 2.0
    assert DEVICE.tally["syncs"] == before
    assert numbers.tolist() == [2.0] * 4


def test_views_are_of_the_same_memory_and_cost_nothing() -> None:
    numbers = zeros(2, 3)
    launches = DEVICE.tally["launches"]
    row = numbers.t()[1]
    assert DEVICE.tally["launches"] == launches
    row.add_(1)
    assert numbers.tolist() == [[0, 1, 0], [0, 1, 0]]


# -- time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_who_reads_what_another_stream_writes_must_wait_for_it(waits: bool) -> None:
    other, written = torch.cuda.Stream(), torch.cuda.Event()
    numbers = zeros(2)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        numbers.add_(1)
        written.record(other)
    if waits:
        torch.cuda.current_stream().wait_event(written)
    assert (numbers * 2).tolist() == ([2.0, 2.0] if waits else [0.0, 0.0])


@pytest.mark.parametrize("waits", [True, False])
def test_who_overwrites_what_another_stream_reads_must_wait_for_it(waits: bool) -> None:
    other, read = torch.cuda.Stream(), torch.cuda.Event()
    numbers = zeros(2)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        seen = numbers + 1
        read.record(other)
    if waits:
        torch.cuda.current_stream().wait_event(read)
    numbers.fill_(7)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        assert seen.tolist() == ([1.0, 1.0] if waits else [8.0, 8.0])


@pytest.mark.parametrize("safe", ["recorded", "waited for", ""])
def test_memory_that_is_let_go_is_overwritten_unless_its_other_stream_is_recorded_or_waited_for(
    safe: str,
) -> None:
    """By the next that its own stream is given, not before."""
    own, other, made = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    numbers = zeros(2) + 1
    made.record()
    with torch.cuda.stream(other):
        other.wait_event(made)
        seen = numbers * 2
    if safe == "recorded":
        numbers.record_stream(other)
    del numbers
    gc.collect()
    if safe == "waited for":
        own.wait_stream(other)
    zeros(1)
    own.synchronize()
    with torch.cuda.stream(other):
        assert (seen.tolist() == [2.0, 2.0]) is bool(safe)


def overtaken(seed: int) -> bool:
    """Whether what another stream writes is there before a stream that does not wait has read."""
    other, numbers = torch.cuda.Stream(), zeros(2)
    torch.cuda.synchronize()
    DEVICE.ahead = random.Random(seed)
    seen = numbers + 1
    with torch.cuda.stream(other):
        for _ in range(10):
            numbers.add_(1)
    return seen.tolist() != [1.0, 1.0]


def test_streams_run_ahead_of_the_host_in_some_order() -> None:
    assert {overtaken(seed) for seed in range(20)} == {True, False}


# -- copies -------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_written_when_the_stream_gets_there(waits: bool) -> None:
    into, arrived = torch.zeros(2, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
    into.copy_(torch.full((2,), 3, device="cuda"), non_blocking=True)
    arrived.record()
    if waits:
        arrived.synchronize()
    assert (into.tolist() == [3, 3]) is waits


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_read_when_the_stream_gets_there(waits: bool) -> None:
    source, read = torch.ones(2).pin_memory(), torch.cuda.Event()
    assert source.is_pinned()
    there = source.to("cuda", non_blocking=True)
    read.record()
    if waits:
        read.synchronize()
    source.fill_(9)
    assert there.tolist() == ([1.0, 1.0] if waits else [9.0, 9.0])


def test_pageable_memory_may_be_overwritten_at_once_and_is_counted() -> None:
    source = torch.ones(2)
    there = source.to("cuda", non_blocking=True)
    source.fill_(9)
    assert there.tolist() == [1.0, 1.0]
    assert DEVICE.tally["pageable"] == 1


def test_an_event_may_not_be_over_when_it_is_asked() -> None:
    event = torch.cuda.Event()
    numbers = zeros(2)
    event.record()
    assert not event.query()
    assert event.query()
    assert isinstance(numbers, DeviceTensor)
    assert not numbers.host.isnan().any()


# -- what CUDA refuses --------------------------------------------------------------------


def test_tensors_of_host_and_device_do_not_mix_but_numbers_do() -> None:
    with pytest.raises(Refused, match="same device"):
        zeros(3) + torch.zeros(3)
    assert (zeros(3) + torch.tensor(2.0)).tolist() == [2.0] * 3


def test_a_kernel_is_given_tensors_of_the_device_only() -> None:
    launch("double", lambda t: t.mul_(2), numbers := zeros(2) + 1)
    assert numbers.tolist() == [2.0, 2.0]
    with pytest.raises(Refused, match="double"):
        launch("double", lambda t: t.mul_(2), torch.ones(2))


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda t: t.sum().item(), lambda t: t.cpu(), lambda t: t.nonzero(), lambda t: t[t > 0],
        lambda t: torch.ones(2).to("cuda"), lambda t: t.copy_(torch.ones(2)),
        lambda t: t[torch.tensor([0])],
    ],
)  # fmt: skip
def test_a_capture_refuses_what_the_host_would_have_to_wait_for(
    forbidden: Callable[[Tensor], object],
) -> None:
    numbers, graph = zeros(2), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(Refused, match="while the stream is capturing"):
        forbidden(numbers)


# -- graphs -------------------------------------------------------------------------------


def test_a_replay_computes_anew_on_the_same_memory() -> None:
    numbers, graph = zeros(2), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = (numbers + 1) * 2
    assert DEVICE.tally["replays"] == 0
    for value in (1.0, 4.0):
        numbers.fill_(value)
        graph.replay()
        assert doubled.tolist() == [2 * (value + 1)] * 2
    assert graph.names == ["add", "mul"]
    assert DEVICE.tally["replays"] == 2


def test_what_a_graph_keeps_for_itself_is_gone_at_the_next_replay() -> None:
    numbers, graph = zeros(2), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = numbers.clone()
        kept_host = kept.host
        total = kept.sum()
        del kept
    graph.replay()
    assert total.tolist() == 0.0
    graph.names.clear()
    graph._work.clear()
    graph.replay()
    torch.cuda.synchronize()
    assert kept_host.isnan().all()
    assert total.tolist() == 0.0, "the graph's output is its user's"


def test_work_is_done_in_its_order_whichever_threads_wait_for_it() -> None:
    """As those do that load weights."""
    stream, done = Stream(), list[int]()

    def work(number: int) -> None:
        time.sleep(1e-4)  # others go on
        done.append(number)

    for number in range(100):
        stream.give(functools.partial(work, number))
    threads = [threading.Thread(target=stream.finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == list(range(100))


# -- a limit ------------------------------------------------------------------------------


def test_memory_beyond_the_limit_is_an_error_and_freed_memory_serves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    monkeypatch.setattr(Block, "limit", Block.held + (3 << 20))
    kept = zeros(2 << 18)  # 2 MiB of float32
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 MiB"):
        zeros(2 << 18)
    del kept
    gc.collect()
    assert float(zeros(2 << 18).sum()) == 0

"""Watching SGLang's own draft workers: read their logits, gate, and stop drafting early.

``draft_forward`` and the draft-extend functions are SGLang's. We shadow the draft
runner's ``forward`` on the instance, read the logits it returns, and, once no draft of
the batch is alive, return a placeholder instead of running the model: the loop then
spins through its remaining steps without a forward, and the tokens it collects lie
after every request's cut. Here what chains (``chain.py``) and trees (``tree.py``) share.

A step is planned before it is drafted. It travels on SGLang's draft input to the draft loop, and
on the verify input to verification and draft extend.

In a CUDA graph the same code runs once, at capture, and without early exits: what it
launches is replayed, and what it leaves behind must be in memory that a graph's pool does
not recycle. Steps that are recorded draft eagerly, because recordings read every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from sglang_c2t.draft.gate import Exploration, Gate
from sglang_c2t.plan.step import StepKind
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.data_parallel import Peers, peers
from sglang_c2t.srt.draft.lengths import DraftLengths
from sglang_c2t.srt.draft.planning import Planning, Step
from sglang_c2t.srt.hooks.reporting import COUNTERS, GATE_CLOCK
from sglang_c2t.srt.hooks.requests import constrained, opts_out

# B requests, V draft vocabulary


class DraftWatcher(EagleDraftWorker):
    """Reads the draft logits of one of SGLang's draft workers for a gate."""

    gate: Gate

    planning: Planning
    """Plans each step, as the policy says."""

    gating: Planning
    """Plans the steps that a gate decides, and those that are recorded."""

    captured_planning: Planning | None = None
    """The planning whose tables the draft graphs write, in charge or not."""

    lengths: DraftLengths
    """What drafts so many layers."""

    packed = False
    """Whether the target forwards surviving rows only; else N rows per request."""

    peers: Peers | None = None
    """The ranks that forward together with this one."""

    _make_gate: Callable[..., Gate]
    _exploration: Exploration | None
    _watcher: Callable[[Any, Callable[[], Any]], Any] | None
    _reads_host = True
    """Whether the draft loop may look at what it has drafted: not in a CUDA graph."""

    def watch(self, make_gate: Callable[..., Gate], exploration: Exploration | None) -> None:
        """Start watching the draft runner.

        ``make_gate`` takes the keyword arguments of
        :class:`~sglang_c2t.draft.gate.Gate` once the request table exists.
        """
        self._make_gate = make_gate
        self._exploration = exploration
        self._watcher = None
        runner = self.draft_runner
        forward = runner.forward

        def watched_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            run = lambda: forward(forward_batch, *args, **kwargs)  # noqa: E731 - passed on
            return run() if self._watcher is None else self._watcher(forward_batch, run)

        attach.write(runner, forward=watched_forward)

    @contextmanager
    def _watching(self, watcher: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Size the relay of first-token statistics like SGLang's own request table."""
        super().alloc_memory_pool(*args, **kwargs)
        self.peers = peers()
        self.lengths = DraftLengths(self)
        self._arrived: set[int] = set()  # slots
        self._constrained: set[int] = set()  # slots, some of requests that have ended
        self.gate = self._make_gate(
            num_slots=self.req_to_token_pool.req_to_token.shape[0],
            device=self.device,
            exploration=self._exploration,
        )

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture drafting with its gate, for each number of layers that a planner may choose, and
        watch the graph of draft extend.
        """
        self.captured_planning = self.planning if self.planning.plans else None
        with self._as_captured():
            super()._capture_cuda_graphs(*args, **kwargs)
        self._count_replays(getattr(self, "cuda_graph_runner", None))
        if self.planning.plans:
            self.lengths.capture()
        extend = getattr(self, "cuda_graph_runner_for_draft_extend", None)
        if extend is None:
            return
        execute = extend.execute

        def watched_execute(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            run = lambda: SimpleNamespace(  # noqa: E731 - passed on
                logits_output=execute(forward_batch, *args, **kwargs)
            )
            output = run() if self._watcher is None else self._watcher(forward_batch, run)
            return output.logits_output

        attach.write(extend, execute=watched_execute)

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """Drafts inside the block as in a step that no recording needs, and without host reads."""
        with (
            attach.swapped(self, "_reads_host", False),
            attach.swapped(self.gate, "exploring", False),
            attach.swapped(self.gate.served, "capturing", True),
        ):
            yield

    def _count_replays(self, graphs: Any) -> None:
        """A replayed graph calls no ``forward`` that could be counted."""
        if graphs is None:
            return
        execute, topk = graphs.execute, self.topk

        def counted_execute(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            forwards = graphs.speculative_num_steps - 1
            COUNTERS.draft_forwards += forwards
            COUNTERS.draft_rows += forwards * forward_batch.batch_size * topk
            drafted = timed_layer(forward_batch, lambda: execute(forward_batch, *args, **kwargs))
            if (step := step_of(forward_batch)) is not None:
                step.layers_end()
            return drafted

        attach.write(graphs, execute=counted_execute)

    @contextmanager
    def _eager_if_recorded(self) -> Iterator[None]:
        """SGLang drafts without its CUDA graph inside the block if the step is recorded."""
        if not self.gate.exploring or getattr(self, "cuda_graph_runner", None) is None:
            yield
            return
        with attach.swapped(self, "cuda_graph_runner", None):
            yield

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure the first token drafted behind each prompt."""
        with self._last_output() as output:
            result = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        if not batch.forward_mode.is_idle():
            self._admit(batch)
            with GATE_CLOCK:
                self.gate.join(batch.req_pool_indices, *output())
        return result

    def arrive(self, batch: Any) -> None:
        """Requests come whose prefill, first draft included, ran on another server.

        Of that draft only tokens and their probabilities travel, not what a gate reads.
        """
        self._arrived.update(self._admit(batch))
        self.gate.join_unmeasured(batch.req_pool_indices)

    def _admit(self, batch: Any) -> list[int]:
        """Requests take slots, which are returned; what they ask for is remembered."""
        slots = [compat.request_slot(req) for req in batch.reqs]
        self.gate.opt_outs.admit(slots, [opts_out(req) for req in batch.reqs])
        self._constrained.difference_update(slots)
        each = zip(slots, batch.reqs, strict=True)
        self._constrained.update(slot for slot, req in each if constrained(req))
        return slots

    def forget_first_layers(self) -> None:
        """Another policy's gate scores from the next step on: it has scored no first layer yet."""
        self.gate.forget_first_layers()
        self._arrived.update(range(self.req_to_token_pool.req_to_token.shape[0]))

    def constrained_in(self, batch: Any) -> list[int]:
        """Indices of the batch's requests whose sampling changes the target's distribution."""
        return _among(self._constrained, batch) if self._constrained else []

    def _begin_step(self, batch: Any) -> Step:
        """Plan the next step. It travels on the draft input."""
        draft_input = batch.spec_info
        step: Step | None = getattr(draft_input, "c2t_step", None)
        if step is not None and step.plan.kind is StepKind.WARMUP:  # of dummy requests
            self._agreed_layers(step.plan.num_layers, batch, full=False)
            return step
        out = map(opts_out, batch.reqs) if self.gate.opt_outs.any else ()
        full = [request for request, opted in enumerate(out) if opted]
        unmeasured = []
        if self._arrived:
            self.gate.catch_up()
            unmeasured = _among(self._arrived, batch)
            self._arrived.clear()
        # In overlap a step or two late: only costs depend on it.
        context = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
        planning = self.gating if self.gate.exploring else self.planning
        step = planning.begin(
            len(batch.reqs),
            context=context or batch.seq_lens_sum,
            full=full,
            constrained=self.constrained_in(batch),
            unmeasured=unmeasured,
            agreed_layers=partial(self._agreed_layers, batch=batch, full=bool(full)),
        )
        draft_input.c2t_step = step
        return step

    def _agreed_layers(self, mine: int, batch: Any, *, full: bool) -> int:
        """The layers of all ranks that forward together, where this one would draft ``mine``."""
        if self.peers is None:
            return mine
        return self.peers.layers(mine, len(batch.reqs), all_of_them=full)

    def _draft_idle(self, draft: Callable[[], Any]) -> Any:
        """SGLang's ``draft`` on an idle rank, with as many layers as the ranks that serve."""
        if self.peers is None:
            return draft()
        with self.lengths.drafting(self.peers.layers(1, 0)):
            return draft()

    def _draft_extend_for_decode(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Measure the first token drafted after each verification."""
        step = getattr(batch.spec_info, "step", None)
        with self._last_output() as output:
            super()._draft_extend_for_decode(batch, *args, **kwargs)
        if batch.forward_mode.is_idle():
            return
        # A graph scores the first layer of every step.
        graphs = getattr(self, "cuda_graph_runner", None) is not None
        uniform = step is not None and step.plan.kind is StepKind.UNIFORM
        with GATE_CLOCK:
            self.gate.relay_first_token(
                batch.req_pool_indices, *output(), later=uniform and not graphs
            )

    @contextmanager
    def _last_output(self) -> Iterator[Callable[[], tuple[Tensor, Tensor | None]]]:
        """Yields a getter for logits [B, V] and hidden states [B, H] of the draft extend
        inside the block.

        SGLang selects the last accepted row of each request *in place* on the output
        object after the forward, so the getter reads it only afterwards.
        """
        outputs: list[Any] = []

        def keep(_forward_batch: Any, run: Callable[[], Any]) -> Any:
            output = run()
            outputs.append(output.logits_output)
            return output

        with self._watching(keep):
            yield lambda: (outputs[-1].next_token_logits, outputs[-1].hidden_states)


def step_of(forward_batch: Any) -> Step | None:
    """The step that a draft forward is of; ``None`` while graphs are captured."""
    return getattr(forward_batch.spec_info, "c2t_step", None)


def timed_layer(forward_batch: Any, run: Callable[[], Any]) -> Any:
    """Run one draft forward; the first one begins the drafting of its step."""
    if (step := step_of(forward_batch)) is not None:
        step.layers_begin()
    return run()


def _among(slots: Collection[int], batch: Any) -> list[int]:
    """The batch's requests that have one of these ``slots``."""
    each = enumerate(map(compat.request_slot, batch.reqs))
    return [request for request, slot in each if slot in slots]


def no_forward(forward_batch: Any, choices: int = 1) -> Any:
    """What ``draft_runner.forward`` returns, for a layer nobody will verify.

    ``choices`` equal logits per row make the loop pick tokens from 0 on; the hidden states
    pass through.
    """
    ids = forward_batch.input_ids
    logits = torch.zeros((len(ids), choices), device=ids.device)
    return SimpleNamespace(
        logits_output=SimpleNamespace(
            next_token_logits=logits, hidden_states=forward_batch.spec_info.hidden_states
        )
    )

"""Watching SGLang's own draft workers: read their logits, gate, and stop drafting early.

``draft_forward`` and the draft-extend functions are SGLang's. We shadow the draft
runner's ``forward`` on the instance, read the logits it returns, and, once no draft of
the batch is alive, return a placeholder instead of running the model: the loop then
spins through its remaining steps without a forward, and the tokens it collects lie
behind every request's cut. Here what chains (``chain.py``) and trees (``tree.py``) share.

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
from sglang_c2t.draft.slots import FirstLayer
from sglang_c2t.plan.plan import Plan
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.data_parallel import Peers, peers
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.hooks.reporting import COUNTERS, GATE_CLOCK
from sglang_c2t.srt.hooks.requests import constrained, opts_out
from sglang_c2t.srt.verify.feedback import Feedback

# B requests, V draft vocabulary


class DraftWatcher(EagleDraftWorker):
    """Reads the draft logits of one of SGLang's draft workers for a gate."""

    gate: Gate

    feedback: Feedback

    planning: Planning | None = None
    """Plans each step, if the policy says so."""

    captured_planning: Planning | None = None
    """The planning whose tables the draft graphs write, in charge or not."""

    packed = False
    """Whether the target forwards surviving rows only; else N rows per request."""

    peers: Peers | None = None
    """The ranks that forward together with this one."""

    drafted_rows: int
    """Rows of a request, root included, that the step in progress drafts at most."""

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
        self._to_relay: Callable[[], None] | None = None
        self._arrived: set[int] = set()  # slots
        self._constrained: set[int] = set()  # slots, some of requests that have ended
        self.gate = self._make_gate(
            num_slots=self.req_to_token_pool.req_to_token.shape[0],
            device=self.device,
            exploration=self._exploration,
        )

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture drafting with its gate, and watch the graph of draft extend."""
        self.captured_planning = self.planning
        with self._as_captured():
            super()._capture_cuda_graphs(*args, **kwargs)
        self._count_replays(getattr(self, "cuda_graph_runner", None))
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
            return execute(forward_batch, *args, **kwargs)

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
        self._interrupted()
        if not batch.forward_mode.is_idle():
            self._catch_up()
            self._admit(batch)
            with GATE_CLOCK:
                self.gate.join(batch.req_pool_indices, *output())
        return result

    def arrive(self, batch: Any) -> None:
        """Requests come whose prefill, first draft included, ran on another server.

        Of that draft only tokens and their probabilities travel, not what a gate reads.
        """
        self._catch_up()  # else it would be told of who had these slots before
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

    def judge_anew(self) -> None:
        """Another policy judges from the next step on: no waiting first layer was judged by it.

        They are forgotten in the next step, where the device has done with the last one.
        """
        self._to_relay = partial(self.gate.first_tokens.forget, slice(None))
        self._arrived.update(range(self.req_to_token_pool.req_to_token.shape[0]))

    def _take_arrived(self, batch: Any) -> list[int]:
        """Which of the batch's requests have a first layer that this gate has not judged, as they
        arrived since the last step or the policy changed.
        """
        if not self._arrived:
            return []
        self._catch_up()
        arrived = _among(self._arrived, batch)
        self._arrived.clear()
        return arrived

    def constrained_in(self, batch: Any) -> list[int]:
        """Which of the batch's requests have a target that is not the model's own."""
        return _among(self._constrained, batch) if self._constrained else []

    def _interrupted(self) -> None:
        """A prefill, or a step that nobody planned, ran between two steps."""
        if self.planning is not None:
            self.planning.interrupted()

    @property
    def draft_widths(self) -> Collection[int] | None:
        """Widths of drafts that a step can have; ``None``: any that a planner knows."""
        return None

    def _begin_planned(
        self, batch: Any, planning: Planning, *, plain: bool = False
    ) -> tuple[Plan, list[int]]:
        """What a step does as planned, and who of its requests wants all verified.

        ``plain``: it may do without a gate, unless somebody wants that.
        """
        slots = batch.req_pool_indices
        planning.unmeasured = self._take_arrived(batch)
        if len(planning.unmeasured) == len(slots):
            planning.interrupted()  # the server was idle
        out = map(opts_out, batch.reqs) if self.gate.opt_outs.any else ()
        whole = [request for request, opted in enumerate(out) if opted]

        def first() -> FirstLayer:
            self._catch_up()
            return self.gate.first_tokens.judged(slots)

        # In overlap a step or two behind: nobody waits for a number that only prices read.
        context = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
        choice = planning.begin(
            len(slots),
            first,
            context=context or batch.seq_lens_sum,
            plain=plain and not whole,
            constrained=self.constrained_in(batch),
        )
        return planning.whole_drafts() if whole else choice.plan, whole

    def _draft_extend_for_decode(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Measure the first token drafted behind each verification."""
        with self._last_output() as output:
            super()._draft_extend_for_decode(batch, *args, **kwargs)
        if batch.forward_mode.is_idle():
            return
        # Behind a plain step comes most often another, which asks for nothing, so that what is
        # still to be measured then is of requests that are in it too, or gone. Recordings want all.
        self._to_relay = partial(self.gate.relay_first_token, batch.req_pool_indices, *output())
        if self.planning is None or not self.planning.plain or self._exploration is not None:
            self._catch_up()

    def _catch_up(self) -> None:
        """Measure the first tokens that nobody has asked for yet."""
        if self._to_relay is not None:
            with GATE_CLOCK:
                self._to_relay()
            self._to_relay = None

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

"""The draft side: watch SGLang's own draft logits, gate, and stop drafting early.

``draft_forward`` and the draft-extend functions are SGLang's. We shadow the draft
runner's ``forward`` on the instance, read the logits it returns, and, once no draft of
the batch is alive, return a placeholder instead of running the model: the loop then
spins through its remaining steps without a forward, and the tokens it collects lie
behind every request's cut. Here for chains; ``tree_draft.py`` adds trees.

In a CUDA graph the same code runs once, at capture, and without early exits: what it
launches is replayed, and what it leaves behind must be in memory that a graph's pool does
not recycle. Instead of exiting early, chains have graphs of several lengths, one of which is
chosen before the replay from what recent steps were like (:class:`~sglang_c2t.plan.load.DraftDepth`).
Steps that are recorded draft eagerly, because recordings read every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor

from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.draft.relay import Exploration, FirstTokenRelay
from sglang_c2t.plan.load import DraftDepth
from sglang_c2t.srt import compat
from sglang_c2t.srt.hooks.reporting import COUNTERS, GATE_CLOCK
from sglang_c2t.srt.hooks.requests import opts_out

# B requests, V draft vocabulary


class DraftWatcher:
    """Reads the draft logits of one of SGLang's draft workers for a gate."""

    gate: FirstTokenRelay
    _make_gate: Callable[..., FirstTokenRelay]
    _exploration: Exploration | None
    _watcher: Callable[[Any, Callable[[], Any]], Any] | None
    _reads_host = True
    """Whether the draft loop may look at what it has drafted: not in a CUDA graph."""

    def watch(
        self, make_gate: Callable[..., FirstTokenRelay], exploration: Exploration | None
    ) -> None:
        """Start watching the draft runner.

        ``make_gate`` takes the keyword arguments of
        :class:`~sglang_c2t.draft.relay.FirstTokenRelay` once the request table exists.
        """
        self._make_gate = make_gate
        self._exploration = exploration
        self._watcher = None
        runner = self.draft_runner  # type: ignore[attr-defined]
        forward = runner.forward

        def watched_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            run = lambda: forward(forward_batch, *args, **kwargs)  # noqa: E731 - passed on
            return run() if self._watcher is None else self._watcher(forward_batch, run)

        compat.write(runner, forward=watched_forward)

    @contextmanager
    def _watching(self, watcher: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Size the relay of first-token statistics like SGLang's own request table."""
        super().alloc_memory_pool(*args, **kwargs)  # type: ignore[misc]
        self.gate = self._make_gate(
            num_slots=self.req_to_token_pool.req_to_token.shape[0],  # type: ignore[attr-defined]
            device=self.device,  # type: ignore[attr-defined]
            exploration=self._exploration,
        )

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture drafting with its gate, and watch the graph of draft extend."""
        with self._as_captured():
            super()._capture_cuda_graphs(*args, **kwargs)  # type: ignore[misc]
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

        compat.write(extend, execute=watched_execute)

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """Drafts inside the block as in a step that no recording needs, and without host reads."""
        with (
            compat.swapped(self, "_reads_host", False),
            compat.swapped(self.gate, "exploring", False),
            compat.swapped(self.gate, "capturing", True),
        ):
            yield

    def _count_replays(self, graphs: Any) -> None:
        """A replayed graph calls no ``forward`` that could be counted."""
        if graphs is None:
            return
        execute, topk = graphs.execute, self.topk  # type: ignore[attr-defined]

        def counted_execute(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            forwards = graphs.speculative_num_steps - 1
            COUNTERS.draft_forwards += forwards
            COUNTERS.draft_rows += forwards * forward_batch.batch_size * topk
            return execute(forward_batch, *args, **kwargs)

        compat.write(graphs, execute=counted_execute)

    @contextmanager
    def _eager_if_recorded(self) -> Iterator[None]:
        """SGLang drafts without its CUDA graph inside the block if the step is recorded."""
        if not self.gate.exploring or getattr(self, "cuda_graph_runner", None) is None:
            yield
            return
        with compat.swapped(self, "cuda_graph_runner", None):
            yield

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure the first token drafted behind each prompt."""
        with self._last_output() as output:
            result = super()._draft_extend_for_prefill(  # type: ignore[misc]
                batch, *args, **kwargs
            )
        if not batch.forward_mode.is_idle():
            slots = [compat.request_slot(req) for req in batch.reqs]
            self.gate.opt(slots, [opts_out(req) for req in batch.reqs])
            with GATE_CLOCK:
                self.gate.join(batch.req_pool_indices, *output())
        return result

    def _draft_extend_for_decode(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Measure the first token drafted behind each verification."""
        with self._last_output() as output:
            super()._draft_extend_for_decode(batch, *args, **kwargs)  # type: ignore[misc]
        if not batch.forward_mode.is_idle():
            with GATE_CLOCK:
                self.gate.relay_first_token(batch.req_pool_indices, *output())

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


class _DraftGraphs(NamedTuple):
    """What SGLang drafts with: CUDA graphs of a number of layers, and their attention."""

    cuda_graph_runner: Any
    draft_attn_backend: Any


class ChainDraftMixin(DraftWatcher):
    """Cuts chains."""

    gate: ChainGate

    verify_lens: Tensor
    """[B] int32 in [1, D + 1]: rows to verify of the step in progress, equal on all ranks."""

    depth: DraftDepth | None = None
    """How many layers the next step drafts; ``None``: always D."""

    steps: int
    """Layers that the step in progress drafts at most."""

    draft_steps: tuple[int, ...] | None = None
    """Numbers of layers to choose from, as configured."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Also make room for the lengths, where CUDA graphs can write them."""
        super().alloc_memory_pool(*args, **kwargs)
        slots = self.req_to_token_pool.req_to_token.shape[0]  # type: ignore[attr-defined]
        self._lens = torch.ones(slots, dtype=torch.int32, device=self.device)  # type: ignore[attr-defined]
        self._all_steps: int = self.speculative_num_steps  # type: ignore[attr-defined]
        self._graphs: dict[int, _DraftGraphs] = {}

    def draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Draft chains; afterwards :attr:`verify_lens` says where each ends."""
        if batch.forward_mode.is_idle():
            return super().draft(batch, *args, **kwargs)  # type: ignore[misc]
        self.steps = self._steps_for(batch)
        with self._eager_if_recorded(), self._drafting(self.steps):
            verify_input = super().draft(batch, *args, **kwargs)  # type: ignore[misc]
        # A copy: the next step writes the same memory while the scheduler reads these.
        self.verify_lens = self.gate.settle(self._lens[: len(batch.seq_lens)].clone())
        return verify_input

    def _steps_for(self, batch: Any) -> int:
        """Layers to draft: all where somebody reads all."""
        if self.depth is None or self.gate.exploring:
            return self._all_steps
        if self.gate.anyone_opted_out and any(map(opts_out, batch.reqs)):
            return self._all_steps
        return self.depth.steps

    def draft_forward(self, forward_batch: Any) -> Any:
        """SGLang's draft loop, with the gate asked after each layer."""
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)  # type: ignore[misc]
        with GATE_CLOCK:
            self.gate.begin(forward_batch.req_pool_indices)
        with self._watching(self._draft_layer):
            parents, scores, tokens, probs = super().draft_forward(forward_batch)  # type: ignore[misc]
        self._lens[: len(forward_batch.req_pool_indices)] = self.gate.verify_lens
        # Layers that were not drafted lie behind every cut.
        tokens = torch.nn.functional.pad(tokens, (0, self._all_steps - tokens.shape[1]))
        return parents, scores, tokens, probs

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture drafting for every number of layers that may be chosen."""
        super()._capture_cuda_graphs(*args, **kwargs)
        runner = getattr(self, "cuda_graph_runner", None)
        if runner is None:
            return
        choices = _choices(self.draft_steps, self._all_steps)
        for steps in choices:
            if 1 < steps < self._all_steps:
                self._graphs[steps] = self._capture(type(runner), steps)
        self._graphs[1] = _DraftGraphs(None, None)  # its token comes from draft extend
        if len(choices) > 1:
            self.depth = DraftDepth(choices)

    def _capture(self, runner_class: type, steps: int) -> _DraftGraphs:
        """Graphs of ``steps`` layers. An attention backend of their own, because a backend's
        buffers belong to the graphs that were captured with it last.
        """
        runner = self.draft_runner  # type: ignore[attr-defined]
        kept = "draft_attn_backend", "draft_extend_attn_backend"
        mine = {name: getattr(self, name) for name in kept}
        theirs = {name: getattr(runner, name) for name in ("draft_attn_backend", "attn_backend")}
        try:
            with self._as_captured(), compat.swapped(self, "speculative_num_steps", steps):
                self.init_attention_backend()  # type: ignore[attr-defined]
                backend = self.draft_attn_backend  # type: ignore[attr-defined]
                graphs = runner_class(self, draft_attn_backend=backend, speculative_num_steps=steps)
        finally:
            for owner, values in ((self, mine), (runner, theirs)):
                compat.write(owner, **values)
        self._count_replays(graphs)
        return _DraftGraphs(graphs, backend)

    @contextmanager
    def _drafting(self, steps: int) -> Iterator[None]:
        """SGLang drafts ``steps`` layers inside the block, and builds chains of D all the same."""
        if steps == self._all_steps:
            yield
            return
        build = eagle_worker_v2.build_eagle_verify_input

        def build_all(*args: Any, **kwargs: Any) -> Any:
            return build(*args, **{**kwargs, "num_steps": self._all_steps})

        graphs = self._graphs[steps]
        with (
            compat.swapped(self, "speculative_num_steps", steps),
            compat.swapped(self, "cuda_graph_runner", graphs.cuda_graph_runner),
            compat.swapped(self, "draft_attn_backend", graphs.draft_attn_backend),
            compat.swapped(eagle_worker_v2, "build_eagle_verify_input", build_all),
        ):
            yield

    def _draft_layer(self, forward_batch: Any, run: Callable[[], Any]) -> Any:
        # Reads the host once per layer: free on a CPU; on a GPU one wait for a tiny
        # kernel, which buys a whole draft forward whenever the batch has stopped.
        if self._reads_host and not self.gate.any_alive():
            COUNTERS.draft_forwards_skipped += 1
            return no_forward(forward_batch)
        output = run()
        logits_output = output.logits_output
        with GATE_CLOCK:
            self.gate.observe(logits_output.next_token_logits, logits_output.hidden_states)
        return output


class C2TEagleDraftWorker(ChainDraftMixin, EagleDraftWorker):
    """Gated draft worker of EAGLE, EAGLE3 and NEXTN."""


class C2TStandaloneDraftWorker(ChainDraftMixin, StandaloneDraftWorker):
    """Gated draft worker of STANDALONE."""


def _choices(configured: tuple[int, ...] | None, all_steps: int) -> list[int]:
    """Numbers of layers to capture graphs for, D among them.

    By default about a third and two thirds of D: each costs memory and time at the start.
    """
    if configured is None:
        configured = (-(-all_steps // 3), -(-2 * all_steps // 3))
    return sorted({*(s for s in configured if s < all_steps), all_steps})


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

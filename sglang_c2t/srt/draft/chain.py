"""SGLang's draft workers, cutting chains.

Instead of exiting early, captured chains have graphs of several lengths, one of which is chosen
before the replay: by the planner (``planning.py``), where a policy plans, else from what recent
steps were like (:class:`~sglang_c2t.plan.load.DraftDepth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor

from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.plan.load import DraftDepth
from sglang_c2t.srt import attach
from sglang_c2t.srt.draft import graph_buffers
from sglang_c2t.srt.draft.plain import PlainDrafting
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.draft.watcher import no_forward
from sglang_c2t.srt.hooks.reporting import COUNTERS, GATE_CLOCK
from sglang_c2t.srt.hooks.requests import opts_out
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.feedback import choose_packing
from sglang_c2t.srt.verify.packing import Packing

# B requests, D layers


class _DraftGraphs(NamedTuple):
    """What SGLang drafts with: CUDA graphs of a number of layers, and their attention."""

    cuda_graph_runner: Any
    draft_attn_backend: Any


class ChainDraftMixin(PlainDrafting):
    """Cuts chains."""

    gate: ChainGate

    depth: DraftDepth | None = None
    """How many layers the next step drafts; ``None``: always D."""

    draft_steps: tuple[int, ...] | None = None
    """Numbers of layers to choose from, as configured."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Also make room for the lengths, where CUDA graphs can write them."""
        super().alloc_memory_pool(*args, **kwargs)
        slots = self.req_to_token_pool.req_to_token.shape[0]
        self._lens = torch.ones(slots, dtype=torch.int32, device=self.device)
        self._all_steps: int = self.speculative_num_steps
        self._graphs: dict[int, _DraftGraphs] = {}

    def draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Draft chains; each ends where the gate ended it."""
        if batch.forward_mode.is_idle():
            return self._draft_along(partial(super().draft, batch, *args, **kwargs))
        planning = self.planning
        if self.gate.exploring:  # recorded: whole drafts, and times that say nothing
            self._interrupted()
            planning = None
        if planning is None:
            steps = wanted = self._steps_for(batch)
        else:
            # A graph has the gate in it, so that a plain step would save nothing.
            eager = self.cuda_graph_runner is None
            plan, self._whole = self._begin_planned(batch, planning, plain=eager)
            steps = wanted = plan.layers
        if self.peers is not None:
            whole = steps == self._all_steps and self._somebody_wants_all(batch)
            steps = self.peers.layers(steps, len(batch.reqs), all_of_them=whole)
            if planning is not None and steps != wanted:
                planning.draft(steps)
        self.drafted_rows = steps + 1
        stock = (
            planning is not None
            and planning.plain
            and planning.rows_each == self.drafted_rows
            and self._sglang_may(batch)
        )
        drafting = self._drafting_short(steps) if stock else self._drafting(steps)
        with self._eager_if_recorded(), drafting:
            if planning is not None and self.cuda_graph_runner is not None:
                planning.layers_begin()  # a replay calls nothing of ours
            verify_input = super().draft(batch, *args, **kwargs)
        if planning is not None:
            planning.layers_end()
            if stock:
                lens, _ = planning.alike()
                return ChainVerifyInput.of(verify_input, verify_lens=lens, exact=self.exact)
            return self._planned(verify_input, batch, planning)
        lens = self.gate.agreed(self._lens[: len(batch.seq_lens)])
        chains = ChainVerifyInput.cut(verify_input, lens, exact=self.exact)
        if self.packed:
            # A recorded step drafts all layers, and its lengths say nothing of the gate.
            depth = None if self.gate.exploring or steps != wanted else self.depth
            chains.packing = choose_packing(
                self.feedback, chains.verify_lens, chains.draft_token_num, depth=depth
            )
        return chains

    def _steps_for(self, batch: Any) -> int:
        """Layers to draft: all where somebody reads all."""
        if self.depth is None or self.gate.exploring:
            return self._all_steps
        return self._all_steps if self._somebody_wants_all(batch) else self.depth.steps

    def _somebody_wants_all(self, batch: Any) -> bool:
        return self.gate.opt_outs.any and any(map(opts_out, batch.reqs))

    def _draft_along(self, draft: Callable[[], Any]) -> Any:
        """SGLang's ``draft`` of nobody, with as many layers as the ranks draft that serve."""
        self._interrupted()
        if self.peers is None:
            return draft()
        with self._drafting(self.peers.layers(1, 0)):
            return draft()

    def _planned(self, verify_input: Any, batch: Any, planning: Planning) -> ChainVerifyInput:
        """Chains cut where the plan's rows are spent."""
        width = verify_input.draft_token_num
        links = None
        if planning.plain:
            lens, total = planning.alike()
        else:
            lens, links, total = planning.settle(
                self.drafted_rows - 1, self._whole, agreed=self.gate.agreed
            )
        chains = ChainVerifyInput.cut(verify_input, lens, links, exact=self.exact)
        if total < len(lens) * width:
            chains.packing = Packing(chains.verify_lens, width, total=total)
        else:
            chains.packing = Packing.full(len(lens), width, lens.device)
        return chains

    def draft_forward(self, forward_batch: Any) -> Any:
        """SGLang's draft loop, gated unless the step is plain."""
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        if self.planning is not None and self.planning.plain:
            forward = partial(super().draft_forward, forward_batch)
            parents, scores, tokens, probs = self._plain_forward(forward)
        else:
            parents, scores, tokens, probs = self._gated_forward(forward_batch)
        # Layers that were not drafted lie behind every cut.
        drafts = self.speculative_num_draft_tokens - 1
        tokens = torch.nn.functional.pad(tokens, (0, drafts - tokens.shape[1]))
        return parents[:, :drafts], scores[:, :drafts], tokens, probs

    def _gated_forward(self, forward_batch: Any) -> Any:
        """SGLang's draft loop, with the gate asked after each layer."""
        self._catch_up()
        with GATE_CLOCK:
            self.gate.begin(forward_batch.req_pool_indices)
        with self._watching(self._draft_layer):
            drafted = super().draft_forward(forward_batch)
        if self.planning is not None and self.gate.program is not None:
            self.planning.drafted(self.gate.confidences)
        if self.gate.cuts:
            self._lens[: len(forward_batch.req_pool_indices)] = self.gate.verify_lens
        return drafted

    def _draft_extend_for_decode(
        self, batch: Any, batch_result: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Extend the draft over what was accepted, see :meth:`_extend_over_accepted`."""
        stock = super()._draft_extend_for_decode
        self._extend_over_accepted(stock, batch, batch_result, *args, **kwargs)

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture drafting for every number of layers that may be chosen."""
        super()._capture_cuda_graphs(*args, **kwargs)
        runner = getattr(self, "cuda_graph_runner", None)
        if runner is None:
            return
        choices = _choices(self.draft_steps, self._all_steps, every=self.planning is not None)
        for steps in choices:
            if 1 < steps < self._all_steps:
                self._graphs[steps] = self._capture(type(runner), steps)
        self._graphs[1] = _DraftGraphs(None, None)  # its token comes from draft extend
        if len(choices) > 1:
            self.depth = DraftDepth(choices)
        if self.planning is not None:
            self.planning.depths = sorted({1, *choices})

    def _capture(self, runner_class: type, steps: int) -> _DraftGraphs:
        """Graphs of ``steps`` layers. An attention backend of their own, because what a backend
        keeps of a batch belongs to the graphs that were captured with it last.
        """
        runner = self.draft_runner
        kept = "draft_attn_backend", "draft_extend_attn_backend"
        mine = {name: getattr(self, name) for name in kept}
        theirs = {name: getattr(runner, name) for name in ("draft_attn_backend", "attn_backend")}
        try:
            with self._as_captured(), attach.swapped(self, "speculative_num_steps", steps):
                self.init_attention_backend()
                backend = self.draft_attn_backend
                graph_buffers.borrow(backend, mine["draft_attn_backend"])
                graphs = runner_class(self, draft_attn_backend=backend, speculative_num_steps=steps)
        finally:
            for owner, values in ((self, mine), (runner, theirs)):
                attach.write(owner, **values)
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

        eager = _DraftGraphs(None, getattr(self, "draft_attn_backend", None))
        graphs = self._graphs.get(steps, eager)
        select = eagle_worker_v2.select_top_k_tokens if steps > 1 else _as_they_are
        with (
            attach.swapped(eagle_worker_v2, "select_top_k_tokens", select),
            attach.swapped(self, "speculative_num_steps", steps),
            attach.swapped(self, "cuda_graph_runner", graphs.cuda_graph_runner),
            attach.swapped(self, "draft_attn_backend", graphs.draft_attn_backend),
            attach.swapped(eagle_worker_v2, "build_eagle_verify_input", build_all),
        ):
            yield

    def _draft_layer(self, forward_batch: Any, run: Callable[[], Any]) -> Any:
        # Reads the host once per layer: free on a CPU; on a GPU one wait for a tiny
        # kernel, which buys a whole draft forward whenever the batch has stopped.
        # Other ranks that forward with this one would wait for it.
        may_skip = self.planning is None and self._reads_host and self.peers is None
        if may_skip and not self.gate.any_alive():
            COUNTERS.draft_forwards_skipped += 1
            return no_forward(forward_batch)
        if self.planning is not None:
            self.planning.layers_begin()
        output = run()
        logits_output = output.logits_output
        with GATE_CLOCK:
            self.gate.observe(logits_output.next_token_logits, logits_output.hidden_states)
        return output


class C2TEagleDraftWorker(ChainDraftMixin, EagleDraftWorker):
    """Gated draft worker of EAGLE, EAGLE3 and NEXTN."""


class C2TStandaloneDraftWorker(ChainDraftMixin, StandaloneDraftWorker):
    """Gated draft worker of STANDALONE."""


def _as_they_are(
    _step: int, topk_p: Tensor, topk_index: Tensor, hidden_states: Any, scores: Any, _topk: int
) -> tuple[Tensor, Any, Any, tuple[Tensor, Tensor, None]]:
    """In place of ``select_top_k_tokens`` for drafts of one layer, behind which nothing is
    forwarded: SGLang's own copies hidden states and numbers parents.
    """
    return topk_index.flatten(), hidden_states, scores, (topk_p.unsqueeze(1), topk_index, None)


def _choices(
    configured: tuple[int, ...] | None, all_steps: int, *, every: bool = False
) -> list[int]:
    """Numbers of layers to capture graphs for, D among them.

    By default about a third and two thirds of D, as each costs memory and time at the start; all
    for a planner, which knows what to do with ``every`` one.
    """
    if configured is None and every:
        configured = tuple(range(1, all_steps))
    if configured is None:
        configured = (-(-all_steps // 3), -(-2 * all_steps // 3))
    return sorted({*(s for s in configured if s < all_steps), all_steps})

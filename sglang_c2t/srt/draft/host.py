"""The host of a drafter: everything that the plugin replaces in SGLang's draft worker.

``draft`` runs the draft loop, ``draft_forward``, or replays a CUDA graph of it, and builds a verify
input from the loop's 4-tuple. Draft extend drafts the first layer of the next step. A drafter
acts on them through a :class:`Host`::

    draft            drafting            layers, graphs or not, and the verify input
      draft_forward  chains, trees       each forward of the draft model is a DraftForward
    draft extend     extend, last_rows

A CUDA graph runs the loop once, at its capture, without early exits. A replay repeats its launches,
and its results must be in memory that the graph's pool does not recycle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from sglang.srt.speculative import eagle_worker_v2
from torch import Tensor

from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.data_parallel import peers
from sglang_c2t.srt.draft import ancestors
from sglang_c2t.srt.draft.lengths import DraftLengths
from sglang_c2t.srt.draft.pending import Window
from sglang_c2t.srt.draft.planning import Step
from sglang_c2t.srt.hooks.reporting import COUNTERS

# B requests, D layers, N rows of a full draft, R rows of a draft forward, V draft vocabulary,
# H draft hidden size, W beam rows, K topk

T = TypeVar("T")

#: Logits [R, V] and hidden states [R, H].
Rows = tuple[Tensor, Tensor | None]


class DraftForward:
    """One forward of the draft model, in SGLang's draft loop or draft extend."""

    output: Any
    """The result for SGLang."""

    def __init__(self, forward_batch: Any, forward: Callable[[], Any]) -> None:
        self._forward_batch, self._forward = forward_batch, forward
        self._selected: Tensor | None = None

    @property
    def rows(self) -> Rows:
        """Logits and hidden states; a CUDA graph of draft extend returns nothing else."""
        rows = getattr(self.output, "logits_output", self.output)
        return rows.next_token_logits, rows.hidden_states

    def run(self) -> Rows:
        """Run the draft model. The first forward of a step starts the timing of its drafts."""
        if (step := step_of(self._forward_batch)) is not None:
            step.layers_begin()
        self.output = self._forward()
        hidden = self.rows[1]
        if self._selected is not None and hidden is not None:  # SGLang has selected the logits only
            output = getattr(self.output, "logits_output", self.output)
            attach.write(output, hidden_states=hidden[self._selected])
        return self.rows

    def select(self, rows: Tensor) -> None:
        """Make a forward of draft extend return these ``rows`` [B] int64 only."""
        attach.write(self._forward_batch.spec_info, select_index=rows)
        self._selected = rows

    def skip(self, choices: int = 1) -> Rows:
        """Run nothing: SGLang's loop chooses among ``choices`` equal logits, from token 0 on."""
        COUNTERS.draft_forwards_skipped += 1
        ids = self._forward_batch.input_ids
        logits = torch.zeros((len(ids), choices), device=ids.device)
        return self.replace(logits, self._forward_batch.spec_info.hidden_states)

    def replace(self, logits: Tensor, hidden: Tensor | None) -> Rows:
        """Replace the result for SGLang."""
        rows = SimpleNamespace(next_token_logits=logits, hidden_states=hidden)
        self.output = SimpleNamespace(logits_output=rows)
        return logits, hidden


#: Runs, skips or replaces a forward.
OnForward = Callable[[DraftForward], object]


class Host:
    """One of SGLang's draft workers, as a drafter sees it. It owns the graphs of each number of
    layers, and the callback of the current draft forwards.
    """

    capturing = False
    """Whether CUDA graphs are being captured, so that the draft loop must not read the device."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._on_forward: OnForward | None = None
        self.lengths = DraftLengths(worker)
        self.topk, self.device, self.server_args = worker.topk, worker.device, worker.server_args
        self.num_steps: int = worker.speculative_num_steps
        self.num_slots: int = worker.req_to_token_pool.req_to_token.shape[0]
        """Rows of SGLang's request table."""
        self.peers = peers()
        """The ranks that forward together with this one, if any."""
        attach.write(worker.draft_runner, forward=self._watched(worker.draft_runner.forward))

    @property
    def token_map(self) -> Tensor | None:
        """[V] int64: target ids of the draft's tokens; ``None`` if they are equal."""
        tokens: Tensor | None = self._worker.hot_token_id
        return tokens

    @property
    def drafts_in_graphs(self) -> bool:
        """Whether CUDA graphs draft."""
        return getattr(self._worker, "cuda_graph_runner", None) is not None

    @property
    def may_skip_drafts(self) -> bool:
        """Whether draft-free steps are possible: not with other ranks, which expect draft extend. A
        plan stream of older SGLang would read a burst's tokens before they are there.
        """
        return self.peers is None and self._worker.plan_stream is None

    def agreed_layers(self, mine: int, requests: int = 0, *, all_of_them: bool = False) -> int:
        """Return the number of layers that all ranks draft; see :meth:`Peers.layers`."""
        peers = self.peers
        return mine if peers is None else peers.layers(mine, requests, all_of_them=all_of_them)

    # -- a draft ------------------------------------------------------------------------------

    @contextmanager
    def drafting(
        self, layers: int, build: Callable[..., Any] | None = None, *, eager: bool = False
    ) -> Iterator[None]:
        """Make SGLang's ``draft`` draft ``layers`` layers inside the block; ``eager``: without
        graphs. ``build`` makes the verify input. Its arguments are a function that makes SGLang's,
        always for D layers; the batch; its draft input; and the results of the draft loop.
        """
        worker, stock = self._worker, eagle_worker_v2.build_eagle_verify_input

        def built(*args: Any, **kwargs: Any) -> Any:
            full = partial(stock, *args, **{**kwargs, "num_steps": self.num_steps})
            return full() if build is None else build(full, *args)

        no_graphs = eager and self.drafts_in_graphs
        with (
            attach.swapped(eagle_worker_v2, "build_eagle_verify_input", built),
            self.lengths.drafting(layers),
            attach.swapped(worker, "cuda_graph_runner", None) if no_graphs else nullcontext(),
        ):
            yield

    def chains(self, loop: Callable[[], Any], on_forward: OnForward) -> Any:
        """Run SGLang's draft ``loop``, and pad the layers that it does not draft."""
        with attach.swapped(self, "_on_forward", on_forward):
            parents, scores, tokens, probs = loop()
        most = self.num_steps
        tokens = torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]))
        return parents[:, :most], scores[:, :most], tokens, probs

    def trees(
        self,
        loop: Callable[[], Any],
        on_forward: OnForward,
        gate: TreeGate,
        organize: Callable[[], tuple[Tensor, Tensor, Tensor]],
    ) -> Any:
        """Run SGLang's draft ``loop`` over the rows that the ``gate`` expands. It returns the three
        tensors of ``organize``, which is called at the loop's end.
        """
        with (
            attach.swapped(self, "_on_forward", on_forward),
            attach.swapped(eagle_worker_v2, "select_top_k_tokens", partial(self._select, gate)),
            attach.swapped(eagle_worker_v2, "organize_draft_results", lambda *_: organize()),
        ):
            return loop()

    def _select(
        self, gate: TreeGate, layer: int, probs: Tensor, tokens: Tensor, hidden: Any, *_: Any
    ) -> tuple[Any, ...]:
        """Replace ``select_top_k_tokens``: return (ids [B * W], hidden [B * W, H], -, -) of the
        next layer. ``probs`` and ``tokens`` [B * W, K] and the ``hidden`` states are those of this
        layer.
        """
        worker, shape = self._worker, (gate.batch, probs.shape[0] // gate.batch, -1)
        beams = gate.add(tokens.view(shape), probs.view(shape))
        if layer < worker.speculative_num_steps - 1:
            if hidden is not None:
                hidden = hidden[beams.row_of_batch.flatten()]
            if layer > 0:  # all ancestors of a first row are in its own row
                ancestors.follow(worker.draft_attn_backend, layer, beams.ancestor_rows)
        # The numbers of the expanded nodes serve a SGLang that follows ancestors itself.
        return beams.tokens.flatten(), hidden, None, (None, None, beams.candidate)

    # -- draft extend -------------------------------------------------------------------------

    def extend(
        self, stock: Callable[[Any, Any], None], batch: Any, batch_result: Any
    ) -> Rows | None:
        """Run draft extend over the accepted tokens; see :meth:`last_rows`.

        SGLang's, the ``stock`` one, extends over N rows of every request, and reads the last
        accepted one. Only D + 1 rows are needed. On a CPU, where reading the device is free, it
        extends over as many rows as the longest request has, and computes logits of the last ones
        only, as CUDA graphs do. With other ranks it does not, because they expect D + 1.
        """
        lens, slots, width = batch_result.accept_lens, batch.out_cache_loc, self.num_steps + 1
        last = None
        if lens.is_cpu and self.peers is None and not batch.forward_mode.is_idle():
            width = int(lens.max())

            def rows(values: Tensor | None) -> Tensor | None:
                """Return the first rows of each request, from [B * (D + 1), ...]."""
                each = None if values is None else values.unflatten(0, (len(lens), -1))[:, :width]
                return None if each is None else each.flatten(0, 1)

            output, batch_result = copy.copy(batch_result.logits_output), copy.copy(batch_result)
            attach.write(output, hidden_states=rows(output.hidden_states))
            tokens, slots = rows(batch_result.next_token_ids), rows(slots)
            attach.write(batch_result, logits_output=output, next_token_ids=tokens)
            if hasattr(batch_result, "prepared_draft_extend_inputs"):
                last = torch.arange(len(lens)) * width + lens - 1
                # SGLang indexes the forward's rows, now the last ones: a slice copies no logits.
                prepared = lens - 1, slice(None), batch_result.next_token_ids.to(torch.int64)
                attach.write(batch_result, prepared_draft_extend_inputs=prepared)
        with (
            attach.swapped(self._worker, "speculative_num_draft_tokens", width),
            attach.swapped(batch, "out_cache_loc", slots),
        ):
            return self.last_rows(partial(stock, batch, batch_result), last)[1]

    def roots_of(self, batch: Any, batch_result: Any) -> tuple[Tensor, Tensor | None]:
        """Return the tokens [B] and the target's hidden states [B, H] of a draft-free step."""

        def first(values: Tensor) -> Tensor:
            return values.unflatten(0, (len(batch.seq_lens), -1))[:, 0].clone()

        hidden = batch_result.logits_output.hidden_states
        return first(batch_result.next_token_ids), None if hidden is None else first(hidden)

    def keep_draft_input(self, draft_input: Any, batch_result: Any) -> None:
        """Give the next step the ``draft_input`` of this one, which no step drafts from."""
        for name in ("topk_p", "topk_index", "hidden_states"):
            value = getattr(draft_input, name)
            attach.write(batch_result.next_draft_input, **{name: value})

    def extend_pending(
        self, stock: partial[None], batch: Any, batch_result: Any, window: Window
    ) -> Rows | None:
        """Run draft extend over a ``window`` of a burst of draft-free steps; see :meth:`extend`. As
        SGLang's, it writes W slots from its first token on.
        """
        width = len(window.tokens) // len(window.counts)
        starts = batch.seq_lens - window.later.to(batch.seq_lens.dtype)
        places = starts[:, None] + torch.arange(width, device=starts.device)
        table = self._worker.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices[:, None].long(), places.long()].flatten().long()
        output, result = copy.copy(batch_result.logits_output), copy.copy(batch_result)
        attach.write(output, hidden_states=window.hidden)
        changed = {"logits_output": output, "next_token_ids": window.tokens}
        if hasattr(batch_result, "prepared_draft_extend_inputs"):
            changed["prepared_draft_extend_inputs"] = None
        attach.write(result, accept_lens=window.counts, **changed)
        swapped = {"seq_lens": starts, "out_cache_loc": slots}
        if batch.seq_lens_cpu is not None:
            swapped["seq_lens_cpu"] = batch.seq_lens_cpu - window.host_later
        with ExitStack() as stack:
            for name, value in swapped.items():
                stack.enter_context(attach.swapped(batch, name, value))
            # The step's plan of KV slots, which some SGLang passes on, begins at its root.
            return self.extend(partial(stock, **dict.fromkeys(stock.keywords)), batch, result)

    def last_rows(self, extend: Callable[[], T], last: Tensor | None = None) -> tuple[T, Any]:
        """Return the result of SGLang's draft ``extend``, and the last accepted row of each request
        [B]; ``None`` if it ran no forward. SGLang selects these rows in place, on the output, after
        the forward, unless that returns the ``last`` rows [B] int64 only.
        """
        forwards: list[DraftForward] = []

        def keep(forward: DraftForward) -> None:
            forwards.append(forward)
            if last is not None:
                forward.select(last)
            forward.run()

        with attach.swapped(self, "_on_forward", keep):
            result = extend()
        return result, forwards[-1].rows if forwards else None

    # -- CUDA graphs --------------------------------------------------------------------------

    def capture(self, stock: Callable[[], None], *, all_lengths: bool) -> None:
        """Capture SGLang's graphs; for a planner, draft graphs of ``all_lengths`` as well."""
        worker = self._worker
        with attach.swapped(self, "capturing", True):
            with compat.draft_extend_width(self.num_steps + 1):
                stock()
            if all_lengths:
                self.lengths.capture()
        shorter = [length.cuda_graph_runner for length in self.lengths.shorter.values()]
        for graphs in [getattr(worker, "cuda_graph_runner", None), *shorter]:
            if graphs is not None:
                attach.write(graphs, execute=self._counted(graphs))
        if (extend := getattr(worker, "cuda_graph_runner_for_draft_extend", None)) is not None:
            attach.write(extend, execute=self._watched(extend.execute))

    def _counted(self, graphs: Any) -> Callable[..., Any]:
        """Return the replay of ``graphs`` with counts, because it calls no ``forward``."""
        execute, topk, forwards = graphs.execute, self.topk, graphs.speculative_num_steps - 1

        def counted(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            COUNTERS.draft_forwards += forwards
            COUNTERS.draft_rows += forwards * forward_batch.batch_size * topk
            if (step := step_of(forward_batch)) is not None:
                step.layers_begin()
            drafted = execute(forward_batch, *args, **kwargs)
            if step is not None:
                step.layers_end()
            return drafted

        return counted

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward`` with the current callback."""

        def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._on_forward is None:
                return forward(forward_batch, *args, **kwargs)
            made = DraftForward(forward_batch, partial(forward, forward_batch, *args, **kwargs))
            self._on_forward(made)
            return made.output

        return watched


def step_of(batch: Any) -> Step | None:
    """Return the step of a batch or a draft forward; ``None`` during a capture."""
    return getattr(batch.spec_info, "c2t_step", None)

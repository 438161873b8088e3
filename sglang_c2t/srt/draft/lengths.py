"""CUDA graphs and draft attention for each number of draft layers.

A planned step drafts a variable number of layers, so graphs are captured for each number and
swapped per step. Each set of graphs has its attention backend, which keeps the batch of its last
capture. All sets share the buffers that graphs read: page tables, indices and lengths are as wide
as batch and context, 134 MB a table for 256 requests of 128k tokens. Each replay rewrites the
buffers, and only one graph replays at a time.
"""

# SGLang's own graphs of several lengths (SpecRuntimeState, AdaptiveController) do not fit. For each
# number of layers they capture the target and draft extend again, for verifications of that width.
# Here the target verifies packed rows in graphs that all lengths share. Steps switch lengths often,
# and SGLang logs a line for each switch.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from sglang_c2t.srt import attach

# D layers

#: Multi-step backends that rewrite everything they read before each replay, as tests have shown.
LENDING = frozenset({"FlashAttentionMultiStepBackend", "FlashInferMultiStepDraftBackend"})


class Length(NamedTuple):
    """SGLang's graphs and attention for a number of draft layers."""

    cuda_graph_runner: Any
    draft_attn_backend: Any


class DraftLengths:
    """Draft lengths of one of SGLang's draft workers, captured, or made on first use. ``worker``
    must be ready to draft all D layers.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._most = worker, worker.speculative_num_steps
        # One layer needs neither: its token comes from draft extend.
        self.shorter = {1: Length(None, None)}

    def capture(self) -> None:
        """Capture drafts of fewer layers, after those of all layers."""
        worker = self._worker
        if (runner := worker.cuda_graph_runner) is None:
            return
        for layers in range(2, self._most):
            backend = self._backend(layers)
            share_graph_buffers(backend, worker.draft_attn_backend)
            sizes = {"draft_attn_backend": backend, "speculative_num_steps": layers}
            with self._swapped(layers, Length(runner, backend)):
                self.shorter[layers] = Length(type(runner)(worker, **sizes), backend)

    @contextmanager
    def drafting(self, layers: int) -> Iterator[None]:
        """Make SGLang draft ``layers`` layers inside the block."""
        if layers == self._most:
            yield
            return
        if layers not in self.shorter:  # without graphs
            self.shorter[layers] = Length(None, self._backend(layers))
        with self._swapped(layers, self.shorter[layers]):
            yield

    @contextmanager
    def _swapped(self, layers: int, length: Length) -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in length._asdict().items():
                stack.enter_context(attach.swapped(self._worker, name, value))
            stack.enter_context(attach.swapped(self._worker, "speculative_num_steps", layers))
            yield

    def _backend(self, layers: int) -> Any:
        """Make SGLang's draft attention for so many ``layers``. The backend for more layers does
        not fit, because the rows of a tree depend on their number.
        """
        worker, runner = self._worker, self._worker.draft_runner
        replaced = [(runner, "draft_attn_backend"), (runner, "attn_backend")]
        replaced += [(worker, "draft_attn_backend"), (worker, "draft_extend_attn_backend")]
        with ExitStack() as stack:
            for owner, name in replaced:
                stack.enter_context(attach.swapped(owner, name, getattr(owner, name)))
            stack.enter_context(attach.swapped(worker, "speculative_num_steps", layers))
            worker.init_attention_backend()
            return worker.draft_attn_backend


def share_graph_buffers(backend: Any, lender: Any) -> None:
    """Make a draft ``backend`` of fewer layers use the graph buffers of a ``lender`` of more
    layers. Other kinds of backends keep their own.
    """
    if type(backend).__name__ not in LENDING or type(backend) is not type(lender):
        return
    make = backend.init_cuda_graph_state
    steps = list(zip(backend.attn_backends, lender.attn_backends, strict=False))

    def take(_max_bs: int, _max_num_tokens: int) -> None:
        pairs = [(backend, lender), *steps]
        before = [dict(vars(mine)) for mine, _ in pairs]
        make(1, 1)  # shows which attributes they are
        for (mine, theirs), had in zip(pairs, before, strict=True):
            for name, value in vars(mine).copy().items():
                if name not in had or had[name] is not value:
                    shared = getattr(theirs, name)
                    if isinstance(shared, dict):  # entries by size belong to captured batches
                        shared = {key: of for key, of in shared.items() if isinstance(key, str)}
                    attach.write(mine, **{name: shared})

    attach.write(backend, init_cuda_graph_state=take)
    for mine, theirs in steps:
        if hasattr(mine, "_create_decode_wrappers"):  # FlashInfer's
            _share_plans(mine, theirs)


def _share_plans(step: Any, lender: Any) -> None:
    """Make a step's FlashInfer wrappers use the plan memory of the same batch size."""
    create = step._create_decode_wrappers

    def created(bs: int, num_tokens: int) -> list[Any]:
        wrappers: list[Any] = create(bs, num_tokens)
        for mine, theirs in zip(wrappers, lender.decode_cuda_graph_metadata[bs], strict=True):
            attach.write(
                mine,
                _int_workspace_buffer=theirs._int_workspace_buffer,
                _pin_memory_int_workspace_buffer=theirs._pin_memory_int_workspace_buffer,
            )
        return wrappers

    attach.write(step, _create_decode_wrappers=created)

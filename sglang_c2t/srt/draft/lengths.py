"""What SGLang drafts with, for each number of layers: CUDA graphs, and their attention.

A planned step drafts as many layers as its plan says, so graphs are captured for each number of
layers and swapped per step. An attention backend belongs to its graphs, because it keeps what it
was given of a batch at the last capture. The buffers that graphs read are shared: page tables,
indices and lengths are as wide as batch and context, 134 MB a table for 256 requests of 128k
tokens. All are written anew before each replay, and one graph is replayed at a time.
"""

# SGLang's own graphs of several lengths (SpecRuntimeState, AdaptiveController) do not serve: with
# each number of draft layers they capture the target and draft extend once more, for verifications
# of that width. Here the target verifies packed rows, in graphs that all lengths share, and a
# switch is made in every other step, which SGLang logs as a line each.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from sglang_c2t.srt import attach

# D layers

#: Multi-step backends that were seen to write all they read before each replay.
LENDING = frozenset({"FlashAttentionMultiStepBackend", "FlashInferMultiStepDraftBackend"})


class Length(NamedTuple):
    """What SGLang drafts a number of layers with."""

    cuda_graph_runner: Any
    draft_attn_backend: Any


class DraftLengths:
    """The lengths of one of SGLang's draft workers, captured or made when they are first drafted.

    ``worker`` is ready to draft all D layers.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._most = worker, worker.speculative_num_steps
        # One layer needs neither: its token comes from draft extend.
        self.shorter = {1: Length(None, None)}

    def capture(self) -> None:
        """Capture drafts of fewer layers, once those of all are there."""
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
        """SGLang drafts so many ``layers`` inside the block."""
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
        """A draft attention for so many ``layers``, as SGLang makes it. Not that of more: where a
        tree's rows stand depends on how many layers there are.
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
    """Let a multi-step draft ``backend`` of fewer layers take its graph buffers from a ``lender``
    of more, which has them already. Other kinds of backends have their own.
    """
    if type(backend).__name__ not in LENDING or type(backend) is not type(lender):
        return
    make = backend.init_cuda_graph_state
    steps = list(zip(backend.attn_backends, lender.attn_backends, strict=False))

    def take(_max_bs: int, _max_num_tokens: int) -> None:
        pairs = [(backend, lender), *steps]
        before = [dict(vars(mine)) for mine, _ in pairs]
        make(1, 1)  # tells which they are
        for (mine, theirs), had in zip(pairs, before, strict=True):
            for name, value in vars(mine).copy().items():
                if name not in had or had[name] is not value:
                    shared = getattr(theirs, name)
                    if isinstance(shared, dict):  # what a graph keeps of its batch is filed by size
                        shared = {key: of for key, of in shared.items() if isinstance(key, str)}
                    attach.write(mine, **{name: shared})

    attach.write(backend, init_cuda_graph_state=take)
    for mine, theirs in steps:
        if hasattr(mine, "_create_decode_wrappers"):  # FlashInfer's
            _share_plans(mine, theirs)


def _share_plans(step: Any, lender: Any) -> None:
    """Have a step's FlashInfer wrappers planned where those of the same batch are."""
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

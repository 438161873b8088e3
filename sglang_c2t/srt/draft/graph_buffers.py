"""Draft graphs of fewer layers, in the attention buffers of those of all.

What a step's attention is told (page tables, indices, lengths) is as wide as batch and context,
134 MB a table for 256 requests of 128k tokens, and SGLang gives each step of a draft several. With
FlashInfer each size of batch has a plan of 8 MiB beside it. All is written anew before each replay,
and only one graph is replayed at a time.
"""

from __future__ import annotations

from typing import Any

from sglang_c2t.srt import attach

#: Multi-step backends that were seen to write all they read before each replay.
LENDING = frozenset({"FlashAttentionMultiStepBackend", "FlashInferMultiStepDraftBackend"})


def borrow(backend: Any, lender: Any) -> None:
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
                    attach.write(mine, **{name: _without_batches(getattr(theirs, name))})

    attach.write(backend, init_cuda_graph_state=take)
    for mine, theirs in steps:
        if hasattr(mine, "_create_decode_wrappers"):  # FlashInfer's
            _borrow_plans(mine, theirs)


def _borrow_plans(step: Any, lender: Any) -> None:
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


def _without_batches(buffers: Any) -> Any:
    """What each graph keeps of its batch stays its own: SGLang files it beside the buffers, by the
    batch's size.
    """
    if isinstance(buffers, dict):
        return {name: buffer for name, buffer in buffers.items() if isinstance(name, str)}
    return buffers

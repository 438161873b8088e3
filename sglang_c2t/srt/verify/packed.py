"""One target forward over the selected rows: the parts that chains and trees share.

SGLang verifies [B, N] rows, and its sampling, grammar, log-probabilities and bookkeeping rely on
that. Here each request has its own number of rows, and only the target's forward is packed::

    PackedVerifyInput [B * N] --pack--> target forward [T] --sample, match--> tokens [B * N]

``run_eagle_verify`` stays SGLang's. While it verifies such an input (:func:`verifying`), this
module replaces three functions that it calls by global name. One prepares the target's batch, one
samples, and for trees one moves the accepted path to the front. The attention backend reads the
rows of each request from SGLang's ``RaggedVerifyLayout``, which DSPARK uses, and further data from
the packing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor

from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.data_parallel import (
    PackedForwardBatch,
    idle_rank_with_dummy_request,
    telling_rows,
)
from sglang_c2t.srt.verify.packing import HostSizes, Packing
from sglang_c2t.srt.verify.penalties import OutputHistory
from sglang_c2t.srt.verify.row_logits import RowLogits, depends_on_outputs

# B requests, N most rows of a request, T rows of the target's forward

#: (predict [B * N], accept_lens [B], accept_index [B, S]): what ``eagle_sample`` returns.
Accepted = tuple[Tensor, Tensor, Tensor]


@dataclasses.dataclass(kw_only=True)
class PackedVerifyInput(EagleVerifyInput):
    """A verification in which the target may forward only some of the rows. The inherited fields
    are SGLang's, [B, N] tables and [B * N] rows.
    """

    packing: Packing | None = None
    """The forwarded rows; ``None``: all, by SGLang's own code."""

    accepts_drafts: bool = True

    step: Any = None
    """The :class:`~sglang_c2t.srt.draft.planning.Step`; ``None`` without requests."""

    @classmethod
    def of(cls, stock: EagleVerifyInput, **own: Any) -> Self:
        """Copy SGLang's verify input, with our ``own`` fields."""
        fields = {f.name: getattr(stock, f.name) for f in dataclasses.fields(stock) if f.init}
        made = cls(**(fields | own))
        for name, value in vars(stock).items():  # SGLang sets more attributes than it declares
            made.__dict__.setdefault(name, value)
        return made

    @property
    def num_rows(self) -> Tensor:
        """[B] int32: verified rows of each request."""
        raise NotImplementedError

    @property
    def forwarded_rows(self) -> int:
        """T, padding included, once the forward is laid out."""
        if self.packing is None:
            return len(self.num_rows) * self.draft_token_num
        return self.packing.forwarded_rows

    @property
    def output_stride(self) -> int:
        """Tokens per request in the output of verification."""
        return self.draft_token_num if self.packing is None else self.max_tree_depth

    def reject_drafts(self) -> None:
        """Accept no draft, whatever the target samples."""
        self.accepts_drafts = False
        none = torch.full_like(self.retrieve_next_token, -1)
        attach.write(self, retrieve_next_token=none)  # read by SGLang's own acceptance

    def accept(
        self,
        stock: Callable[..., Accepted],
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Accepted:
        """Replace ``eagle_sample``, the ``stock`` one, on packed outputs [T, ...]."""
        raise NotImplementedError

    def accepted_to_front(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replace ``_finalize_accept_tree_path``, which SGLang calls for trees."""
        raise NotImplementedError


@dataclasses.dataclass(kw_only=True)
class IdleVerifyInput(PackedVerifyInput):
    """One dummy row, which an idle rank forwards while other ranks verify packed rows. See
    :func:`~sglang_c2t.srt.data_parallel.idle_rank_with_dummy_request`.
    """

    @classmethod
    def with_dummy_row(cls, stock: EagleVerifyInput) -> Self:
        """Replace SGLang's idle input, which has no rows, by one with a dummy row."""
        width, device = stock.draft_token_num, stock.draft_token.device
        one = torch.ones(1, dtype=torch.int32)
        packing = Packing(one.to(device), width, total=1, sizes=HostSizes(one))
        places = torch.ones(width, dtype=torch.int64, device=device)
        made = cls.of(stock, packing=packing)
        attach.write(made, draft_token=places - 1, positions=places)
        return made

    @property
    def num_rows(self) -> Tensor:
        """[1] int32."""
        assert self.packing is not None
        return self.packing.num_rows

    def accept(
        self,
        stock: Callable[..., Accepted],
        batch: Any,
        logits_output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Accepted:
        """Accept nothing from the dummy row."""
        if (states := logits_output.hidden_states) is not None:
            attach.write(logits_output, hidden_states=states[:0])
        return stock(self, batch, logits_output, *args, **kwargs)


@contextmanager
def verifying(
    verify_input: PackedVerifyInput,
    target_worker: Any,
    history: OutputHistory | None = None,
) -> Iterator[None]:
    """Verify the packed rows of ``verify_input`` in ``run_eagle_verify`` inside the block, or all.
    The step gets the time of ``target_worker``'s forward. ``history`` gets the output of requests
    whose penalties depend on it.
    """
    step = verify_input.step
    timing = nullcontext() if step is None else step.timing(target_worker, verify_input)
    common: Any = eagle_worker_common
    sample = partial(accept, verify_input, common.eagle_sample, history)
    if verify_input.packing is None:
        with timing, attach.swapped(common, "eagle_sample", sample):
            yield
        return
    prepare_rows = partial(prepare, common.eagle_prepare_for_verify)
    with (
        attach.swapped(common, "eagle_prepare_for_verify", prepare_rows),
        attach.swapped(common, "eagle_sample", sample),
        attach.swapped(common, "_finalize_accept_tree_path", verify_input.accepted_to_front),
        timing,
    ):
        yield


def accept(
    verify_input: PackedVerifyInput,
    stock: Callable[..., Accepted],
    history: OutputHistory | None,
    _verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Accepted:
    """Wrap ``eagle_sample``: make logits that depend on outputs exact for each row."""
    rows = None
    if history is not None and depends_on_outputs(batch.sampling_info):
        rows = RowLogits(verify_input, batch, history)
        rows.change(logits_output, grammar_mask)
        grammar_mask = None
    packed = verify_input.packing is not None
    sample = partial(verify_input.accept, stock) if packed else partial(stock, verify_input)
    accepted = sample(batch, logits_output, grammar_mask, *args, **kwargs)
    if rows is not None:
        rows.keep(accepted)
    return accepted


def prepare(
    stock: Callable[..., Any],
    verify_input: PackedVerifyInput,
    req_to_token_pool: Any,
    batch: Any,
    target_worker: Any,
) -> Any:
    """Wrap ``eagle_prepare_for_verify``: build the forward batch from the packed rows."""
    packing = verify_input.packing
    assert packing is not None, "called outside of verifying()"
    idle, places = batch.forward_mode.is_idle(), batch.out_cache_loc
    try:
        with idle_rank_with_dummy_request(batch) if idle else nullcontext():
            packed, slots = packing.forwarded(verify_input, batch, target_worker.model_runner)
            attach.write(batch, spec_info=packed)
            with (
                compat.writing_rows(packed, slots),
                compat.rotating_rows(packed, verify_input.positions, packing.rotated),
                telling_rows(batch, packed, packing.rows_of_ranks),
            ):
                prepared = stock(packed, req_to_token_pool, batch, target_worker)
        if packing.rows_of_ranks is not None:
            prepared[0].__class__ = PackedForwardBatch
        if not idle:
            # Draft extend writes after the committed prefix, wherever the rows were verified.
            places = packing.layout.window[:, : verify_input.max_tree_depth].flatten()
        return prepared
    finally:
        attach.write(batch, spec_info=verify_input, out_cache_loc=places)


def packing_of(forward_batch: Any) -> Packing | None:
    """Return the packing of a verify forward; ``None`` for any other forward."""
    verify_input = getattr(forward_batch, "spec_info", None)
    return verify_input.packing if isinstance(verify_input, PackedVerifyInput) else None

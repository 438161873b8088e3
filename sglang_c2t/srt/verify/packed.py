"""One target forward over the rows that are worth it: what chains and trees share.

SGLang verifies [B, N] rows, and sampling, grammar, log-probabilities and bookkeeping rely on it.
Here each request brings its own number of rows, as many as its chain or tree has nodes, and only
the target's forward sees them packed::

    PackedVerifyInput [B * N] --pack--> target forward [T] --sample, match--> tokens [B * N]

``run_eagle_verify`` stays SGLang's. Three functions that it calls by their global names are ours
while it verifies such an input (:func:`verifying`): the one that prepares the target's batch, the
sampler and, for trees, the one that moves the accepted path to the front. The attention backend
learns the rows of each request from SGLang's own ``RaggedVerifyLayout``, which DSPARK uses, and
what it needs beyond from the packing.
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
    """A verification of which the target may forward some rows only.

    The inherited fields are SGLang's, [B, N] tables and [B * N] rows.
    """

    packing: Packing | None = None
    """Which rows are forwarded; ``None``: all of them, and nothing here is ours."""

    accepts_drafts: bool = True

    step: Any = None
    """The :class:`~sglang_c2t.srt.draft.planning.Step` that is verified; ``None``: no request's."""

    @classmethod
    def of(cls, stock: EagleVerifyInput, **own: Any) -> Self:
        """SGLang's verify input, with fields of our ``own``."""
        fields = {f.name: getattr(stock, f.name) for f in dataclasses.fields(stock) if f.init}
        made = cls(**(fields | own))
        for name, value in vars(stock).items():  # SGLang hangs more on it than it declares
            made.__dict__.setdefault(name, value)
        return made

    @property
    def num_rows(self) -> Tensor:
        """[B] int32: rows of each request that are verified."""
        raise NotImplementedError

    @property
    def forwarded_rows(self) -> int:
        """T, padding included, once the forward is laid out."""
        if self.packing is None:
            return len(self.num_rows) * self.draft_token_num
        return self.packing.forwarded_rows

    @property
    def output_stride(self) -> int:
        """Places of a request in the tokens that verification gives back."""
        return self.draft_token_num if self.packing is None else self.max_tree_depth

    def reject_drafts(self) -> None:
        """Accept no draft, whatever the target says."""
        self.accepts_drafts = False
        none = torch.full_like(self.retrieve_next_token, -1)
        attach.write(self, retrieve_next_token=none)  # where SGLang's own acceptance looks

    def accept(
        self,
        stock: Callable[..., Accepted],
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Accepted:
        """In place of ``eagle_sample``, the ``stock`` one, on packed outputs [T, ...]."""
        raise NotImplementedError

    def accepted_to_front(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of ``_finalize_accept_tree_path``, which SGLang calls for trees."""
        raise NotImplementedError


@dataclasses.dataclass(kw_only=True)
class IdleVerifyInput(PackedVerifyInput):
    """One dummy row, which an idle rank forwards while other ranks verify packed rows.

    See :func:`~sglang_c2t.srt.data_parallel.idle_rank_with_dummy_request`.
    """

    @classmethod
    def with_dummy_row(cls, stock: EagleVerifyInput) -> Self:
        """In place of SGLang's own, which has no rows."""
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
        """Nothing, whatever the row has become."""
        if (states := logits_output.hidden_states) is not None:
            attach.write(logits_output, hidden_states=states[:0])
        return stock(self, batch, logits_output, *args, **kwargs)


@contextmanager
def verifying(
    verify_input: PackedVerifyInput,
    target_worker: Any,
    history: OutputHistory | None = None,
) -> Iterator[None]:
    """``run_eagle_verify`` verifies the packed rows of ``verify_input`` inside the block, or all.

    Its step learns what the forward of ``target_worker`` took, and ``history`` the output of
    requests whose penalties depend on it.
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
    """Around ``eagle_sample``: logits that depend on outputs are made those of each row."""
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
    """Around ``eagle_prepare_for_verify``: the forward batch is built from the packed rows."""
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
            # Draft extend writes behind the committed prefix, wherever the rows were verified.
            places = packing.layout.window[:, : verify_input.max_tree_depth].flatten()
        return prepared
    finally:
        attach.write(batch, spec_info=verify_input, out_cache_loc=places)


def packing_of(forward_batch: Any) -> Packing | None:
    """The packing of a verify forward; ``None`` for any other forward."""
    verify_input = getattr(forward_batch, "spec_info", None)
    return verify_input.packing if isinstance(verify_input, PackedVerifyInput) else None

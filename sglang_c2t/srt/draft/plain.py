"""Steps as SGLang itself makes them: chains of one length or trees of one size, and no gate.

What servers of chains and of trees draft in their plain steps (``plan/plain.py``), and how either
extends the draft over what was accepted on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from sglang_c2t.srt import attach
from sglang_c2t.srt.draft.watcher import DraftWatcher
from sglang_c2t.srt.verify.row_logits import depends_on_outputs

# B requests, N rows of a full draft


class PlainDrafting(DraftWatcher):
    """Drafts plain steps."""

    exact = True
    """Whether drafts are accepted by sampling and matching, as thresholds of 1 ask for."""

    def _sglang_may(self, batch: Any) -> bool:
        """Whether a step may be SGLang's own: nothing is packed, which would take the host time
        for nothing.

        On a CPU, where attention reads the width of each input. Not where requests sample: these
        get the same tokens from the same seed whatever is verified, which SGLang does not promise.
        Nor where logits depend on what a request said, which each row of a tree has its own of, nor
        beside other ranks, whose drafts may have other lengths.
        """
        alone = self.device == "cpu" and self.peers is None
        info = batch.sampling_info
        return alone and bool(info.is_all_greedy) and not depends_on_outputs(info)

    @contextmanager
    def _drafting_short(self, steps: int, rows: int | None = None) -> Iterator[None]:
        """SGLang drafts ``steps`` layers inside the block, and builds chains of as many, or trees
        of so many ``rows``.
        """
        with (
            attach.swapped(self, "speculative_num_steps", steps),
            attach.swapped(self, "speculative_num_draft_tokens", rows or steps + 1),
        ):
            yield

    def _plain_forward(self, forward: Callable[[], Any]) -> Any:
        """SGLang's draft loop ``forward``, timed, with nobody looking at its layers."""
        with self._watching(self._plain_layer):
            parents, scores, tokens, probs = forward()
        if self.topk > 1:
            return parents, scores, tokens, probs
        # SGLang's tables are of whole chains.
        drafts = self.speculative_num_draft_tokens - 1
        return parents[:, :drafts], scores[:, :drafts], tokens, probs

    def _plain_layer(self, _forward_batch: Any, run: Callable[[], Any]) -> Any:
        assert self.planning is not None
        self.planning.layers_begin()
        return run()

    def _extend_over_accepted(
        self, stock: Callable[..., None], batch: Any, batch_result: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Extend the draft over what was accepted, on a CPU, where the host may look.

        SGLang, the ``stock`` one, extends over N rows of every request, and reads the last accepted
        one of each. So do we beside other ranks, which know of so many.
        """
        accept_lens = batch_result.accept_lens
        as_many = self.peers is not None or not accept_lens.is_cpu
        if batch.forward_mode.is_idle() or as_many:
            stock(batch, batch_result, *args, **kwargs)
            return
        longest = int(accept_lens.max())
        rows = partial(first_rows, requests=len(accept_lens), longest=longest)
        narrow, output = copy.copy(batch_result), copy.copy(batch_result.logits_output)
        attach.write(output, hidden_states=rows(output.hidden_states))
        attach.write(narrow, logits_output=output, next_token_ids=rows(narrow.next_token_ids))
        with (
            attach.swapped(self, "speculative_num_draft_tokens", longest),
            attach.swapped(batch, "out_cache_loc", rows(batch.out_cache_loc)),
        ):
            stock(batch, narrow, *args, **kwargs)


def first_rows(values: Tensor | None, *, requests: int, longest: int) -> Tensor | None:
    """Of [B * N, ...] the ``longest`` first rows of each of B ``requests``."""
    if values is None:
        return None
    return values.unflatten(0, (requests, -1))[:, :longest].flatten(0, 1)

"""Tokens that draft extend has not read yet.

A draft-free step verifies the roots only, and skips draft extend. Without it the draft model lacks
the step's token, so the requests cannot draft. Draft extend reads W = D + 1 tokens at once, so a
burst of W draft-free steps needs one, at its end.

A request that ends during a burst leaves up to W tokens without draft keys. A later request with
the same prefix then drafts a little worse. Its output does not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_c2t.srt.verify.packing import sent

# B requests, H width of the target's hidden states for the draft


class Window(NamedTuple):
    """The tokens of B requests, those of each request first among its W places."""

    counts: Tensor
    """[B] int32: tokens of each request."""

    host_counts: Tensor
    """[B] int64: the same on the host."""

    tokens: Tensor
    """[B * W] int64."""

    hidden: Tensor | None
    """[B * W, H]; ``None`` for a draft that reads none."""


class _Step(NamedTuple):
    slots: list[int]
    tokens: Tensor  # [B]
    hidden: Tensor | None  # [B, H]


class PendingTokens:
    """Tokens of the current burst, by request slot. Methods take the slots of running requests.

    Args:
        width: W.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._steps: list[_Step] = []

    def most(self, slots: Sequence[int]) -> int:
        """Return the largest number of tokens of any request in these ``slots``."""
        return sum(not set(slots).isdisjoint(step.slots) for step in self._steps)

    def add(self, slots: Sequence[int], tokens: Tensor, hidden: Tensor | None) -> None:
        """Add the ``tokens`` [B] of a step and the ``hidden`` states [B, H] that yielded them."""
        if not self.most(slots):  # all requests of the last burst have ended
            self._steps.clear()
        self._steps.append(_Step([*slots], tokens, hidden))

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the tokens of ``slots``, which belong to new requests."""
        for step in self._steps:
            step.slots[:] = [GONE if slot in slots else slot for slot in step.slots]

    def take(self, slots: Sequence[int]) -> Window:
        """Remove all tokens, and return those of ``slots`` [B]."""
        steps, self._steps = self._steps, []
        batch, width, device = len(slots), self.width, steps[-1].tokens.device
        row_of = {slot: row for row, slot in enumerate(slots)}
        counts: Counter[int] = Counter()
        places = []
        for slot in (slot for step in steps for slot in step.slots):
            row = row_of.get(slot)
            # The last place collects the tokens of requests that have ended.
            places.append(batch * width if row is None else row * width + counts[slot])
            counts[slot] += 1
        host_counts = [counts[slot] for slot in slots]
        numbers = torch.tensor(places + host_counts)
        on_device = sent(numbers, device)

        def spread(values: Sequence[Tensor]) -> Tensor:
            """Return values at their places, [B * W, ...]."""
            each = torch.cat(list(values))
            made = each.new_zeros((batch * width + 1, *each.shape[1:]))
            return made.index_copy_(0, on_device[: len(places)], each)[:-1]

        hidden = [step.hidden for step in steps if step.hidden is not None]
        return Window(
            on_device[len(places) :].to(torch.int32),
            numbers[len(places) :],
            spread([step.tokens for step in steps]).to(torch.int64),
            spread(hidden) if hidden else None,
        )


#: Slot of a request that has ended.
GONE = -1

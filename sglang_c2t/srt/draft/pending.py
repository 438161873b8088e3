"""Tokens that draft extend has not read yet.

A draft-free step verifies the roots only, and skips draft extend. Without it the draft model lacks
the step's token, so the requests cannot draft. Draft extend reads W = D + 1 tokens at once, so a
burst of W draft-free steps needs one, at its end.

A request that ends during a burst leaves up to W tokens without draft keys. A later request with
the same prefix then drafts a little worse. Its output does not change.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

# B requests, H width of the target's hidden states for the draft


class Window(NamedTuple):
    """The tokens of B requests, those of each request first among its W places."""

    counts: Tensor
    """[B] int32: tokens of each request."""

    tokens: Tensor
    """[B * W] int64."""

    hidden: Tensor | None
    """[B * W, H]; ``None`` for a draft that reads none."""


class _Step(NamedTuple):
    running: set[int]
    slots: Tensor  # [B]
    tokens: Tensor  # [B]
    hidden: Tensor | None  # [B, H]


class PendingTokens:
    """Tokens of the current burst, by request slot.

    Args:
        num_slots: Rows of SGLang's request table.
        width: W.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self._num_slots, self.width = num_slots, width
        self._steps: list[_Step] = []

    def most(self, running: Collection[int]) -> int:
        """Return the largest number of tokens of any request in the ``running`` slots."""
        if not self._steps:
            return 0
        return sum(not step.running.isdisjoint(running) for step in self._steps)

    def add(
        self, running: Collection[int], slots: Tensor, tokens: Tensor, hidden: Tensor | None
    ) -> None:
        """Add the ``tokens`` [B] of a step and the ``hidden`` states [B, H] that yielded them. The
        requests' ``slots`` [B] are ``running`` on the host.
        """
        if self._steps and not self.most(running):  # all requests of that burst have ended
            self._steps.clear()
        self._steps.append(_Step(set(running), slots, tokens, hidden))

    def forget(self, slots: Collection[int]) -> None:
        """Forget the tokens of ``slots``, which belong to new requests."""
        for at, step in enumerate(self._steps):
            if not step.running.isdisjoint(slots):
                gone = torch.tensor(sorted(slots), device=step.slots.device)
                kept = step.slots.masked_fill(torch.isin(step.slots, gone), self._num_slots)
                self._steps[at] = step._replace(running=step.running.difference(slots), slots=kept)

    def take(self, slots: Tensor) -> Window:
        """Remove all tokens, and return those of ``slots`` [B]."""
        steps, self._steps = self._steps, []
        batch, width, device = len(slots), self.width, slots.device
        # Row B collects the tokens of requests that have ended.
        row_of = torch.full((self._num_slots + 1,), batch, device=device)
        row_of[slots] = torch.arange(batch, device=device)
        counts = torch.zeros(batch + 1, dtype=torch.int64, device=device)
        tokens = torch.zeros((batch + 1, width), dtype=torch.int64, device=device)
        last = steps[-1].hidden
        hidden = None if last is None else last.new_zeros((batch + 1, width, last.shape[1]))
        for step in steps:
            rows = row_of[step.slots]
            at = counts[rows]
            tokens[rows, at] = step.tokens.to(torch.int64)
            if hidden is not None and step.hidden is not None:
                hidden[rows, at] = step.hidden
            counts[rows] += 1
            counts[batch] = 0
        return Window(
            counts[:batch].to(torch.int32),
            tokens[:batch].flatten(),
            None if hidden is None else hidden[:batch].flatten(0, 1),
        )

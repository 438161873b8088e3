"""Tokens that draft extend has not read yet.

A draft-free step verifies the roots only, and skips draft extend. Without it the draft model lacks
the step's token, so the requests cannot draft. Draft extend reads W = D + 1 tokens of each request
at once. It runs at the end of a burst of draft-free steps, as often as their tokens need.

A request that ends during a burst needs none. It leaves its last tokens without draft keys. A later
request with the same prefix then drafts a little worse. Its output does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_c2t.srt.verify.packing import sent

# B requests, H width of the target's hidden states for the draft

#: Bytes of hidden states after which a burst ends. SGLang has not reserved this memory.
MOST_BYTES = 64 << 20


class Window(NamedTuple):
    """Successive tokens of B requests, those of each request first among its W places."""

    counts: Tensor
    """[B] int32: tokens of each request."""

    later: Tensor
    """[B] int32: tokens of each request between the window's first and its last pending one."""

    host_later: Tensor
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
        most_bytes: See :data:`MOST_BYTES`.
    """

    def __init__(self, width: int, most_bytes: int = MOST_BYTES) -> None:
        self._width, self._most_bytes = width, most_bytes
        self._steps: list[_Step] = []

    def any(self, slots: Sequence[int]) -> bool:
        """Whether a request in these ``slots`` has tokens; the last step ran all that have."""
        return bool(self._steps) and not set(slots).isdisjoint(self._steps[-1].slots)

    @property
    def full(self) -> bool:
        """Whether the burst must end, because its tokens fill W places and the memory."""
        states = [step.hidden for step in self._steps if step.hidden is not None]
        used = sum(hidden.nbytes for hidden in states)
        return len(self._steps) >= self._width and used >= self._most_bytes

    def add(self, slots: Sequence[int], tokens: Tensor, hidden: Tensor | None) -> None:
        """Add the ``tokens`` [B] of a step and the ``hidden`` states [B, H] that yielded them."""
        while self._steps and set(slots).isdisjoint(self._steps[0].slots):
            del self._steps[0]  # all of its requests have ended
        self._steps.append(_Step([*slots], tokens, hidden))

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the tokens of ``slots``, which belong to new requests."""
        gone = set(slots)
        for step in self._steps:
            step.slots[:] = [GONE if slot in gone else slot for slot in step.slots]

    def take(self, slots: Sequence[int]) -> Iterator[Window]:
        """Remove all tokens, and yield those of ``slots`` [B], each of which has some, in windows.

        The last window holds the last tokens of every request, so that it yields all next drafts. A
        request with fewer tokens than others repeats its first ones in earlier windows, which
        changes nothing.
        """
        steps, width, batch = self._steps, self._width, len(slots)
        self._steps = []
        own: dict[int, list[int]] = {slot: [] for slot in slots}
        for place, slot in enumerate(slot for step in steps for slot in step.slots):
            if slot in own:
                own[slot].append(place)
        tokens = torch.cat([step.tokens for step in steps]).to(torch.int64)
        states = [step.hidden for step in steps if step.hidden is not None]
        hidden = torch.cat(states) if states else None
        for in_later_windows in reversed(range(0, max(map(len, own.values())), width)):
            counts, later, places = [], [], []
            for each in own.values():
                begin = max(len(each) - in_later_windows - width, 0)
                part = each[begin : begin + width]
                counts.append(len(part))
                later.append(len(each) - 1 - begin)
                places += part + part[-1:] * (width - len(part))
            numbers = torch.tensor(counts + later + places)
            on_device = sent(numbers, tokens.device)
            at, sizes = on_device[2 * batch :], on_device[: 2 * batch].to(torch.int32)
            yield Window(
                sizes[:batch],
                sizes[batch:],
                numbers[batch : 2 * batch],
                tokens[at],
                None if hidden is None else hidden[at],
            )


#: Slot of a request that has ended.
GONE = -1

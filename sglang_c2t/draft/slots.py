"""State per request slot that passes from one step to the next.

SGLang drafts the first token (in trees: the first layer) of a step at the end of the previous one,
in draft extend. Its measurements wait in a table with one row per request slot, because requests
come, go and change places between two steps.

Legend: B requests, K children of the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_c2t.draft_layer import value_unmeasured
from sglang_c2t.kernels.gate_program import Relay


class FirstLayer(NamedTuple):
    """A program's output for the first layer, best children first."""

    entropy: Tensor  # [B] float32
    prob: Tensor  # [K, B] float32, as the next
    confidence: Tensor


class FirstTokens:
    """Measurements of each request's next first layer; without one the draft counts as certain.

    Args:
        num_slots: Rows of SGLang's ``req_to_token`` table.
        device: Device of the draft logits.
        topk: K.
    """

    def __init__(self, num_slots: int, device: torch.device | str, topk: int) -> None:
        self._num_slots, self._topk = num_slots, topk
        self.device = device
        names = ["entropy", *["prob"] * topk, *["confidence"] * topk]
        self._certain = torch.tensor([value_unmeasured(name) for name in names], device=device)
        # One table, so that one launch writes or reads all outputs of a program.
        self._judged = self._certain[:, None].repeat(1, num_slots)  # [1 + 2 K, num_slots]
        self._columns: dict[str, Tensor] = {}  # by name, [num_slots] or [num_slots, width]

    def relay(self, slots: Tensor) -> Relay:
        """Where a program writes its output for the K children of each root in ``slots`` [B]."""
        return Relay(self._judged, slots)

    def judged(self, slots: Tensor) -> FirstLayer:
        """Return a copy of the program's output for ``slots`` [B]."""
        rows = self._judged.index_select(1, slots)
        return FirstLayer(rows[0], *rows[1:].view(2, self._topk, -1).unbind())

    def reserve(self, name: str) -> None:
        """Allocate the column ``name``, with one number per request."""
        self._column(name)

    def put(self, name: str, slots: Tensor, value: Tensor) -> None:
        """Write ``value`` [B, ...] (or [1, ...] for all) to the rows ``slots`` [B]."""
        self._column(name, value.shape[1:])[slots] = value.to(self.device, torch.float32)

    def get(self, name: str, slots: Tensor) -> Tensor:
        """[B, ...] float32; :func:`value_unmeasured` without a measurement."""
        return self._column(name)[slots]

    def forget(self, slots: Tensor | slice) -> None:
        """Forget the measurements of ``slots`` [B]: the gate did not measure their next first
        layers.
        """
        self._judged[:, slots] = self._certain[:, None]
        for name, column in self._columns.items():
            column[slots] = value_unmeasured(name)

    def _column(self, name: str, shape: Sequence[int] = ()) -> Tensor:
        if name not in self._columns:
            sizes, value = (self._num_slots, *shape), value_unmeasured(name)
            self._columns[name] = torch.full(sizes, value, device=self.device)
        return self._columns[name]


class OptOuts:
    """Requests that opted out, so that their full drafts are verified."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._slots: set[int] = set()
        self._whole = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def admit(self, slots: Sequence[int], out: Sequence[bool]) -> None:
        """Assign ``slots`` [B] to requests, and mark those that opt ``out`` [B]. It writes to the
        device only if a slot's mark changes. That is rare and happens at prefill.
        """
        changed = {s: o for s, o in zip(slots, out, strict=True) if o != (s in self._slots)}
        if not changed:
            return
        self._slots = (self._slots | changed.keys()) - {s for s, o in changed.items() if not o}
        rows = torch.tensor(list(changed), device=self._whole.device)
        self._whole[rows] = torch.tensor(list(changed.values()), device=self._whole.device)

    @property
    def any(self) -> bool:
        """Whether some slot's last request opted out; its request may have ended."""
        return bool(self._slots)

    def whole(self, slots: Tensor) -> Tensor | None:
        """[B] bool: requests that opted out; ``None`` if there are none. Never ``None`` on a GPU,
        because a CUDA graph is captured once for both cases.
        """
        return self._whole[slots] if self._slots or self._whole.is_cuda else None

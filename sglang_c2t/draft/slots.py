"""What is kept per request slot from one step to the next.

SGLang drafts the first token (in trees: the first layer) of a step at the end of the step
before, in draft extend. What was measured there waits in a table with one row per request
slot, because between two steps requests come, go and change places.

Knows nothing of SGLang.

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
    """What a gate's program says of the first layer, best children first."""

    entropy: Tensor  # [B] float32
    prob: Tensor  # [K, B] float32, like the next
    confidence: Tensor


class FirstTokens:
    """Measurements of each request's next first layer; certain where nobody measured.

    Args:
        num_slots: Rows of SGLang's ``req_to_token`` table.
        device: Where draft logits live.
        topk: K.
    """

    def __init__(self, num_slots: int, device: torch.device | str, topk: int) -> None:
        self._num_slots, self._topk = num_slots, topk
        self.device = device
        names = ["entropy", *["prob"] * topk, *["confidence"] * topk]
        self._certain = torch.tensor([value_unmeasured(name) for name in names], device=device)
        # Together, so that one launch writes or reads all that a program says.
        self._judged = self._certain[:, None].repeat(1, num_slots)  # [1 + 2 K, num_slots]
        self._columns: dict[str, Tensor] = {}  # by name, [num_slots] or [num_slots, width]

    def relay(self, slots: Tensor) -> Relay:
        """Where a program leaves what it says of the K children of each root in ``slots`` [B]."""
        return Relay(self._judged, slots)

    def judged(self, slots: Tensor) -> FirstLayer:
        """What was written for ``slots`` [B], the caller's own."""
        rows = self._judged.index_select(1, slots)
        return FirstLayer(rows[0], *rows[1:].view(2, self._topk, -1).unbind())

    def reserve(self, name: str) -> None:
        """Make the column of one number per request."""
        self._column(name)

    def put(self, name: str, slots: Tensor, value: Tensor) -> None:
        """Write ``value`` [B, ...] (or [1, ...] for all) to the rows ``slots`` [B]."""
        self._column(name, value.shape[1:])[slots] = value.to(self.device, torch.float32)

    def get(self, name: str, slots: Tensor) -> Tensor:
        """[B, ...] float32; :func:`value_unmeasured` where nothing was written."""
        return self._column(name)[slots]

    def forget(self, slots: Tensor | slice) -> None:
        """Forget what was measured for ``slots`` [B]: the gate of the next step did not measure
        their first layers.
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
    """Whose drafts stay whole because their requests asked for it."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._slots: set[int] = set()
        self._whole = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def admit(self, slots: Sequence[int], out: Sequence[bool]) -> None:
        """Requests take ``slots`` [B]; the drafts of those that opt ``out`` [B] stay whole.

        Writes to the device only where a slot's answer changes: hardly ever, and then at the
        prefill of its request.
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
        """[B] bool: whose drafts stay whole; ``None``: nobody's.

        A CUDA graph is captured once for all, hence never ``None`` there.
        """
        return self._whole[slots] if self._slots or self._whole.is_cuda else None

"""What is known about a request's next first token, from one step to the next.

SGLang drafts the first token (in trees: the first layer) of a step at the end of the step
before, in draft extend. What was measured there waits in a table with one row per request
slot, because between two steps requests come, go and change places.

Pure torch; knows nothing of SGLang.

Legend: B requests, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import HISTORY, measure, unknown


class Exploration:
    """Which steps verify full drafts so that they can be recorded. Here: none.

    A gate that ends drafts hides exactly the tokens it distrusts; labels are only
    uncensored in steps it does not touch.
    """

    names: frozenset[str] = frozenset()
    """What to measure in an exploring step beyond the policy's needs."""

    def next_step_explores(self) -> bool:
        """Asked once per step, before the first token of the next step is measured."""
        return False


class FirstTokenRelay:
    """Keeps the measurements of each request's next first token.

    Args:
        policy: Has ``name`` and ``needs``, what it reads beyond ``prob`` and ``entropy``.
        num_slots: Rows of SGLang's ``req_to_token`` table.
        device: Where draft logits live.
        exploration: Which steps are left whole.

    Raises:
        ConfigError: The policy reads a request's history, which only replay supplies.
    """

    def __init__(
        self,
        policy: Any,
        *,
        num_slots: int,
        device: torch.device | str,
        exploration: Exploration | None = None,
    ) -> None:
        if history := policy.needs & HISTORY:
            raise ConfigError(
                f"policy {policy.name} reads {', '.join(sorted(history))}: experimental, in replay "
                "only; choose another --c2t-policy"
            )
        self._needs: frozenset[str] = policy.needs
        self._exploration = exploration or Exploration()
        self._table = _SlotTable(num_slots, device)
        self._explore_next = self._exploration.next_step_explores()
        self._names: frozenset[str] = frozenset()  # measured in the step in progress
        self.exploring = False
        """Whether the step in progress verifies full drafts."""

    def join(self, slots: Tensor, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Requests [B] enter with the logits [B, V] of the first token behind their prompt.

        Everything is measured, because it is not known yet which kind of step comes next.
        """
        self._relay(slots, logits, hidden, self._exploration.names)

    def relay_first_token(
        self, slots: Tensor, logits: Tensor, hidden: Tensor | None = None
    ) -> None:
        """Remember the statistics of each request's next first token.

        ``slots`` is [B] (``req_pool_indices``), ``logits`` [B, V] of the draft, ``hidden``
        [B, H] its hidden state.
        """
        self._explore_next = self._exploration.next_step_explores()
        extra = self._exploration.names if self._explore_next else frozenset()
        self._relay(slots, logits, hidden, extra)

    def first_tokens_complete(self, slots: Tensor) -> Tensor:
        """[B] bool: the first tokens of this step carry all that exploration measures."""
        return self._table.get("complete", slots).bool()

    def _begin(self, slots: Tensor) -> dict[str, Tensor]:
        """A step starts: what was relayed for the requests in ``slots`` [B], by name."""
        self.exploring = self._explore_next
        extra = self._exploration.names if self.exploring else frozenset()
        self._names = self._needs | extra
        return {name: self._table.get(name, slots) for name in ("prob", "entropy", *self._names)}

    def _relay(
        self, slots: Tensor, logits: Tensor, hidden: Tensor | None, extra: frozenset[str]
    ) -> None:
        names = self._needs | extra
        for name, value in measure(logits, names, hidden=hidden).items():
            self._table.put(name, slots, value)
        if self._exploration.names:
            complete = float(self._exploration.names <= names)
            self._table.put("complete", slots, torch.full((1,), complete))


class _SlotTable:
    """One row per request slot and name, made when the name is first seen."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._num_slots = num_slots
        self._device = device
        self._columns: dict[str, Tensor] = {}  # [num_slots] or [num_slots, width]

    def put(self, name: str, slots: Tensor, value: Tensor) -> None:
        """Write ``value`` [B, ...] (or [1, ...] for all) to the rows ``slots`` [B]."""
        self._column(name, value.shape[-1])[slots] = value.to(self._device, torch.float32)

    def get(self, name: str, slots: Tensor) -> Tensor:
        """[B, ...] float32; what :func:`unknown` says where nobody ever wrote."""
        return self._column(name, 1)[slots]

    def _column(self, name: str, width: int) -> Tensor:
        if name not in self._columns:
            row = unknown(name, width).to(self._device)
            self._columns[name] = row.repeat(self._num_slots, *([1] * (row.dim() - 1)))
        return self._columns[name]

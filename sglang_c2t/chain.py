"""Draft chains of a batch: which are still alive, where each ends, and their packing.

A chain of request b is its root (the committed bonus token, always verified) followed
by up to D drafted tokens. ``verify_lens[b]`` counts the rows the target verifies, root
included, so it lies in [1, D + 1]::

    request 0   root a b c      verify_lens 4      packed rows: root a b c
    request 1   root x          verify_lens 2                   root x
                                                   row numbers: 0 1 2 3 | 4 5   (width 4)

Pure torch; knows nothing of SGLang.

Legend: B requests, N = D + 1 rows of a full chain, T = sum of verify_lens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import HISTORY, DraftLayer, measure, unknown
from sglang_c2t.policies.base import ChainPolicy


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


class ChainGate:
    """Asks the policy after each drafted layer and keeps the answer per request.

    SGLang drafts the first token of a step at the end of the previous step (draft
    extend), so its statistics are relayed in a table with one row per request slot.

    Args:
        policy: Where a chain ends.
        num_slots: Rows of SGLang's ``req_to_token`` table.
        device: Where draft logits live.
        exploration: Which steps are left whole.
        agree: Makes a [B] uint8 tensor equal on all tensor-parallel ranks, in place or
            not, and returns it. Identity on one rank.

    Raises:
        ConfigError: The policy reads a request's history, which only replay supplies.
    """

    def __init__(
        self,
        policy: ChainPolicy,
        *,
        num_slots: int,
        device: torch.device | str,
        exploration: Exploration | None = None,
        agree: Callable[[Tensor], Tensor] = lambda decision: decision,
    ) -> None:
        if history := policy.needs & HISTORY:
            raise ConfigError(
                f"policy {policy.name} reads {', '.join(sorted(history))}: experimental, in replay "
                "only; choose another --c2t-policy"
            )
        self._policy = policy
        self._agree = agree
        self._exploration = exploration or Exploration()
        self._table = _SlotTable(num_slots, device)
        self._explore_next = self._exploration.next_step_explores()
        self._layers: list[DraftLayer] = []
        self._alive = torch.ones(0, dtype=torch.bool, device=device)  # [B]
        self._num_kept = torch.zeros(0, dtype=torch.int32, device=device)  # [B]
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

    def begin(self, slots: Tensor) -> None:
        """Start a step for the requests in ``slots`` [B], and judge their first tokens."""
        self._layers = []
        self._alive = torch.ones(slots.shape, dtype=torch.bool, device=slots.device)
        self._num_kept = torch.zeros(slots.shape, dtype=torch.int32, device=slots.device)
        self.exploring = self._explore_next
        extra = self._exploration.names if self.exploring else frozenset()
        self._names = self._policy.needs | extra
        names = ("prob", "entropy", *self._names)
        self._judge({name: self._table.get(name, slots) for name in names})

    def observe(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Judge the next drafted layer from its draft ``logits`` [B, V]."""
        self._judge(measure(logits, self._names, hidden=hidden))

    def any_alive(self) -> bool:
        """Whether any chain may still grow. Reads the host: eager mode only."""
        return bool(self._alive.any())

    @property
    def verify_lens(self) -> Tensor:
        """[B] int32 in [1, D + 1]: rows to verify, root included."""
        return self._num_kept + 1

    @property
    def layers(self) -> list[DraftLayer]:
        """The layers judged in this step, shallowest first."""
        return self._layers

    def first_tokens_complete(self, slots: Tensor) -> Tensor:
        """[B] bool: the first tokens of this step carry all that exploration measures."""
        return self._table.get("complete", slots).bool()

    def _relay(
        self, slots: Tensor, logits: Tensor, hidden: Tensor | None, extra: frozenset[str]
    ) -> None:
        names = self._policy.needs | extra
        for name, value in measure(logits, names, hidden=hidden).items():
            self._table.put(name, slots, value)
        if self._exploration.names:
            complete = float(self._exploration.names <= names)
            self._table.put("complete", slots, torch.full((1,), complete))

    def _judge(self, stats: dict[str, Tensor]) -> None:
        parent = self._layers[-1] if self._layers else None
        joint = stats["prob"] if parent is None else stats["prob"] * parent.joint
        layer = DraftLayer(
            depth=len(self._layers) + 1,
            prob=stats["prob"],
            joint=joint,
            entropy=stats["entropy"],
            alive=self._alive,
            measured=stats,
            parent=parent,
        )
        keep = self._alive if self.exploring else self._policy.keep(layer) & self._alive
        self._alive = self._agree(keep.to(torch.uint8)).bool()
        self._num_kept = self._num_kept + self._alive
        self._layers.append(layer)


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


def truncated_chains(retrieve_next_token: Tensor, verify_lens: Tensor) -> Tensor:
    """Chains in SGLang's linked form, cut: nothing follows row verify_lens - 1.

    ``retrieve_next_token`` is [B, N] int64, the row after each row or -1; so is the result.
    The verify kernels walk it, so a cut chain ends there and its bonus token comes from
    that row. A copy, because SGLang may share one constant chain between steps.
    """
    rows = torch.arange(retrieve_next_token.shape[1], device=verify_lens.device)
    return retrieve_next_token.masked_fill(rows >= verify_lens[:, None] - 1, -1)


def packed_rows(verify_lens: Tensor, width: int) -> Tensor:
    """[T] int64: numbers of the surviving rows in a [B * width] layout, in order.

    verify_lens [3, 1], width 4 -> [0, 1, 2, 4].
    """
    rows = torch.arange(width, device=verify_lens.device)
    # nonzero reads the host to size its result: ragged verification is eager here.
    return (rows < verify_lens[:, None]).flatten().nonzero().flatten()


def unpack_rows(packed: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...]: row i of ``packed`` [T, ...] lands at ``rows[i]``, the rest is 0."""
    full = packed.new_zeros((num_rows, *packed.shape[1:]))
    full[rows] = packed
    return full


def matched_drafts(draft_tokens: Tensor, target_tokens: Tensor) -> Tensor:
    """[B] int64 in [0, D]: drafts that a greedy target would accept.

    ``draft_tokens`` [B, D + 1] starts with the root, ``target_tokens`` [B, D + 1] is the
    target's choice behind each of them. Drafts a b c, target a x c: 1.
    """
    return (draft_tokens[:, 1:] == target_tokens[:, :-1]).long().cumprod(dim=1).sum(dim=1)

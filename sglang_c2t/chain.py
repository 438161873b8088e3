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
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.draft_layer import DraftLayer, measure
from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.relay import FirstTokenRelay


class ChainGate(FirstTokenRelay):
    """Asks the policy after each drafted layer and keeps the answer per request.

    Args:
        policy: Where a chain ends.
        agree: Makes a [B] uint8 tensor equal on all tensor-parallel ranks, in place or
            not, and returns it. Identity on one rank.
        relay: See :class:`~sglang_c2t.relay.FirstTokenRelay`.
    """

    def __init__(
        self,
        policy: ChainPolicy,
        *,
        agree: Callable[[Tensor], Tensor] = lambda decision: decision,
        **relay: Any,
    ) -> None:
        super().__init__(policy, **relay)
        self._policy = policy
        self._agree = agree
        self._layers: list[DraftLayer] = []
        self._alive = torch.ones(0, dtype=torch.bool)  # [B]
        self._num_kept = torch.zeros(0, dtype=torch.int32)  # [B]

    def begin(self, slots: Tensor) -> None:
        """Start a step for the requests in ``slots`` [B], and judge their first tokens."""
        self._layers = []
        self._alive = torch.ones(slots.shape, dtype=torch.bool, device=slots.device)
        self._num_kept = torch.zeros(slots.shape, dtype=torch.int32, device=slots.device)
        self._judge(self._begin(slots))

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

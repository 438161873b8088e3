"""Properties of requests that affect their drafts, by slot in SGLang's request table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang_c2t.draft.gate import Gate
from sglang_c2t.srt import compat
from sglang_c2t.srt.draft.pending import PendingTokens
from sglang_c2t.srt.hooks.requests import constrained, opts_out


class Requests:
    """Slots of constrained requests, and of those whose first layer has no score. Requests may have
    ended. The ``gate`` owns the slots of those that opted out.
    """

    def __init__(self, gate: Gate, num_slots: int, pending: PendingTokens) -> None:
        self._gate, self._num_slots, self._pending = gate, num_slots, pending
        self._constrained: set[int] = set()
        self._unscored: set[int] = set()

    def admit(self, batch: Any) -> list[int]:
        """Assign slots to new requests, and return the slots."""
        slots = slots_of(batch)
        self._pending.forget(slots)
        self._gate.opt_outs.admit(slots, [opts_out(req) for req in batch.reqs])
        self._constrained.difference_update(slots)
        each = zip(slots, batch.reqs, strict=True)
        self._constrained.update(slot for slot, req in each if constrained(req))
        return slots

    def arrive(self, batch: Any) -> None:
        """Add requests whose prefill, first draft included, ran on another server. Only that
        draft's tokens and probabilities are transferred, not the inputs of a gate.
        """
        self._unscored.update(self.admit(batch))
        self._gate.join_unmeasured(batch.req_pool_indices)

    def forget_scores(self) -> None:
        """Forget all scores, because another policy's gate scores from the next step on."""
        self._gate.forget_first_layers()
        self._unscored.update(range(self._num_slots))

    def unscored(self, batch: Any) -> list[int]:
        """Return the batch indices of requests whose first layer has no score."""
        if not self._unscored:
            return []
        self._gate.catch_up()
        return _among(self._unscored, batch)

    def scored(self) -> None:
        """Note that draft extend has scored the next first layers."""
        self._unscored.clear()

    def opted_out(self, batch: Any) -> list[int]:
        """Return the batch indices of requests that opted out."""
        each = enumerate(batch.reqs) if self._gate.opt_outs.any else ()
        return [request for request, req in each if opts_out(req)]

    def constrained(self, batch: Any) -> list[int]:
        """Return the batch indices of requests whose sampling changes the target's distribution."""
        return _among(self._constrained, batch) if self._constrained else []


def _among(slots: Collection[int], batch: Any) -> list[int]:
    """Return the batch indices of requests with one of these ``slots``."""
    return [request for request, slot in enumerate(slots_of(batch)) if slot in slots]


def slots_of(batch: Any) -> list[int]:
    """Return the slots of the requests of a ``batch``."""
    return [compat.request_slot(req) for req in batch.reqs]

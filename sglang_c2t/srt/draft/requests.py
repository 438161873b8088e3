"""Properties of requests that affect their drafts, by slot in SGLang's request table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang_c2t.draft.gate import Gate
from sglang_c2t.srt import compat
from sglang_c2t.srt.hooks.requests import constrained, opts_out


class Requests:
    """Slots of constrained requests, and of those whose first layer has no score. Requests may have
    ended. The ``gate`` owns the slots of those that opted out.
    """

    def __init__(self, gate: Gate, num_slots: int) -> None:
        self._gate, self._num_slots = gate, num_slots
        self._constrained: set[int] = set()
        self._unscored: set[int] = set()

    def admit(self, batch: Any) -> list[int]:
        """Assign slots to new requests, and return the slots."""
        slots = [compat.request_slot(req) for req in batch.reqs]
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

    def pop_unscored(self, batch: Any) -> list[int]:
        """Return the batch indices of requests whose first layer has no score, once: draft extend
        scores the next one.
        """
        if not self._unscored:
            return []
        self._gate.catch_up()
        unscored, self._unscored = self._unscored, set()
        return _among(unscored, batch)

    def opted_out(self, batch: Any) -> list[int]:
        """Return the batch indices of requests that opted out."""
        each = enumerate(batch.reqs) if self._gate.opt_outs.any else ()
        return [request for request, req in each if opts_out(req)]

    def constrained(self, batch: Any) -> list[int]:
        """Return the batch indices of requests whose sampling changes the target's distribution."""
        return _among(self._constrained, batch) if self._constrained else []


def _among(slots: Collection[int], batch: Any) -> list[int]:
    """Return the batch indices of requests with one of these ``slots``."""
    each = enumerate(map(compat.request_slot, batch.reqs))
    return [request for request, slot in each if slot in slots]

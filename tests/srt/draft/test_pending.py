"""Tokens of a burst of draft-free steps, until draft extend reads them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.srt.draft.pending import PendingTokens

SLOTS, WIDTH = 6, 4

#: Slots of the running requests of each step, and those that new requests got before it.
BURSTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True),
        st.sets(st.integers(0, SLOTS - 1), max_size=2),
    ),
    min_size=1,
    max_size=WIDTH,
)


@given(BURSTS, st.permutations(range(SLOTS)))
def test_pending_tokens_are_those_of_each_running_request_in_order(
    burst: list[tuple[list[int], set[int]]], last: list[int]
) -> None:
    """Requests come and go, and change places, within a burst and before its draft extend."""
    pending, expected = PendingTokens(WIDTH), dict[int, list[int]]()
    for number, (running, new) in enumerate(burst):
        pending.forget([*new])
        for slot in new:
            expected.pop(slot, None)
        if not any(expected.get(slot) for slot in running):
            expected.clear()
        tokens = torch.tensor([10 * number + slot for slot in running])
        pending.add(running, tokens, tokens[:, None].float())
        for slot, token in zip(running, tokens.tolist(), strict=True):
            expected.setdefault(slot, []).append(token)
    slots = last[:3]
    counts = [len(expected.get(slot, [])) for slot in slots]
    assert (pending.most(slots) > 0) == any(counts)
    window = pending.take(slots)
    assert window.counts.tolist() == window.host_counts.tolist() == counts
    for tokens, hidden, slot, count in zip(
        window.tokens.view(3, WIDTH).tolist(),
        window.hidden.view(3, WIDTH).tolist(),
        slots,
        counts,
        strict=True,
    ):
        assert tokens[:count] == hidden[:count] == expected.get(slot, [])
    assert pending.most(range(SLOTS)) == 0

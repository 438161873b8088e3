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
    max_size=3 * WIDTH,
)


@given(BURSTS)
def test_windows_hold_the_pending_tokens_of_each_running_request_in_order(
    burst: list[tuple[list[int], set[int]]],
) -> None:
    """Requests come and go, and change places, within a burst."""
    pending, expected = PendingTokens(WIDTH), dict[int, list[int]]()
    for number, (running, new) in enumerate(burst):
        pending.forget([*new])
        ended = new | {slot for slot in expected if slot not in running}
        expected = {slot: tokens for slot, tokens in expected.items() if slot not in ended}
        pending.forget([*ended])  # what SGLang runs again it admits again
        tokens = torch.tensor([10 * number + slot for slot in running])
        pending.add(running, tokens, tokens[:, None].float())
        for slot, token in zip(running, tokens.tolist(), strict=True):
            expected.setdefault(slot, []).append(token)
    assert pending.any(running)
    windows = [*pending.take(running)]
    assert len(windows) == -(-max(map(len, expected.values())) // WIDTH)
    for row, slot in enumerate(running):
        wanted, read = expected[slot], 0
        for window in windows:
            count, later = int(window.counts[row]), int(window.later[row])
            begin = len(wanted) - 1 - later
            assert later == window.host_later[row]
            tokens = window.tokens.view(-1, WIDTH)[row, :count].tolist()
            assert tokens == window.hidden.view(-1, WIDTH)[row, :count].tolist()
            assert tokens == wanted[begin : begin + count]
            assert begin <= read, "no token is left out"
            read = begin + count
        assert read == len(wanted), "the last window ends with the last token"
    assert not pending.any(range(SLOTS))


def test_pending_tokens_are_full_once_their_states_fill_the_memory_and_a_window() -> None:
    pending = PendingTokens(WIDTH, most_bytes=5 * 4 * 2)
    fulls = []
    for _ in range(6):
        pending.add([1, 2], torch.zeros(2), torch.zeros((2, 1)))
        fulls.append(pending.full)
    assert fulls == [False] * 4 + [True] * 2
    pending.add([3, 4], torch.zeros(2), torch.zeros((2, 1)))
    assert not pending.full, "tokens of requests that have ended are dropped"

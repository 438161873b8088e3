"""Token tiers of verification in CUDA graphs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.tiers import Tiers

servers = st.builds(
    Tiers,
    max_requests=st.integers(1, 300),
    width=st.integers(1, 64),
    max_rows=st.none() | st.integers(1, 4000),
    rows_per_slot=st.sampled_from([1, 2, 4]),
)


@given(servers)
def test_tiers_rise_from_one_row_to_the_largest_batch(tiers: Tiers) -> None:
    rows = tiers.rows
    assert rows == sorted(set(rows))
    most = tiers.max_requests * tiers.width
    if tiers.max_rows is not None:
        most = min(most, max(tiers.max_rows, tiers.max_requests))
    assert (rows[0], rows[-1]) == (1, most)


@given(servers)
def test_tiers_slots_hold_their_rows(tiers: Tiers) -> None:
    for rows in tiers.rows:
        slots = tiers.slots(rows)
        assert 1 <= slots <= min(rows, tiers.max_requests)
        assert rows <= slots * tiers.width


@given(servers, st.data())
def test_tiers_pick_the_smallest_that_holds_the_batch(tiers: Tiers, data: st.DataObject) -> None:
    requests = data.draw(st.integers(1, tiers.max_requests))
    rows = data.draw(st.integers(requests, requests * tiers.width))

    def holds(tier: int) -> bool:
        slots = tiers.slots(tier)
        return rows <= tier and (requests < slots or (requests == slots and rows == tier))

    fitting = [tier for tier in tiers.rows if holds(tier)]
    assert tiers.pick(rows, requests) == (fitting[0] if fitting else None)


@given(st.integers(1, 300), st.integers(1, 64), st.data())
def test_tiers_with_a_spare_slot_hold_every_batch(
    requests: int, width: int, data: st.DataObject
) -> None:
    tiers = Tiers(requests + 1, width)
    rows = data.draw(st.integers(requests, requests * width))
    tier = tiers.pick(rows, requests)
    assert tier is not None
    # An eighth of a tier is padding at most, once there are rows enough.
    assert tier - rows <= max(8, tier // 8)

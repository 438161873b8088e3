"""Agreement between ranks of data-parallel attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_c2t.srt.data_parallel import Peers


@pytest.mark.parametrize(
    ("others", "mine", "agreed"),
    [
        ([[0, 1, 5], [0, 30, 2]], (3, 7), 2),  # the rank with most requests
        ([[0, 7, 4], [0, 0, 1]], (3, 7), 4),  # of equally many the deeper
        ([[0, 0, 1], [0, 0, 1]], (3, 7), 3),  # no other rank serves
        ([[1, 1, 6], [0, 30, 2]], (3, 7), 6),  # one rank must have all
    ],
)
def test_peers_draft_the_layers_of_the_rank_with_most_requests(
    monkeypatch: pytest.MonkeyPatch, others: Any, mine: tuple[int, int], agreed: int
) -> None:
    monkeypatch.setattr(Peers, "of_all", lambda self, *told: [list(told), *others])
    assert Peers.__new__(Peers).layers(*mine) == agreed


def test_peers_hear_the_first_rank_of_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two and two: they say the same."""
    group = SimpleNamespace(size=lambda: 4)
    parallel = SimpleNamespace(
        attn_dp_size=2, attn_tp_size=2, tp_group=SimpleNamespace(cpu_group=group)
    )

    def all_gather(everyones: list[torch.Tensor], told: torch.Tensor, group: Any) -> None:
        assert group is parallel.tp_group.cpu_group
        for number, each in enumerate(everyones):
            each.copy_(told + 10 * (number // 2))

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    assert Peers(parallel).of_all(1, 2) == [[1, 2], [11, 12]]

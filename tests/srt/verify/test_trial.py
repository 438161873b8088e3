"""Results that the trial counts as another row's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.srt.data_parallel import Peers
from sglang_c2t.srt.verify import trial
from sglang_c2t.srt.verify.trial import APART, APART_ROUNDED, EXCUSED, difference
from tests.doubles import double

VOCABULARY = 200


def logits(seed: int, rows: int) -> torch.Tensor:
    """[R, V], each row with a level and a spread of its own."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn((rows, VOCABULARY), generator=random)
    return found * torch.rand((rows, 1), generator=random).add(0.1) * 20 + seed % 7


@given(st.integers(0, 2**20), st.integers(1, 12))
def test_trial_finds_rows_of_other_requests_and_ignores_rounding(seed: int, rows: int) -> None:
    wanted = logits(seed, rows)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert difference(wanted.to(dtype), wanted, dtype) is None
        others = difference(logits(seed + 1, rows), wanted, dtype)
        assert others is not None
        assert f"{rows} of {rows} packed rows" in others


@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(0, 12))
def test_trial_excuses_a_few_rows(seed: int, rows: int, other: int) -> None:
    wanted, other = logits(seed, rows), min(other, rows)
    found = wanted.clone()
    found[:other] = logits(seed + 1, other)
    assert (difference(found, wanted, torch.bfloat16) is None) == (other <= EXCUSED * rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trial_bound_of_a_row(dtype: torch.dtype) -> None:
    wanted = logits(0, 4)
    spread = (wanted - wanted.mean(dim=1, keepdim=True)).norm(dim=1, keepdim=True)
    away = torch.nn.functional.one_hot(torch.zeros(4, dtype=torch.int64), VOCABULARY) * spread
    limit = APART.get(dtype, APART_ROUNDED)
    assert difference(wanted + 0.9 * limit * away, wanted, dtype) is None
    assert difference(wanted + 1.1 * limit * away, wanted, dtype) is not None


def test_trial_finds_nan_and_missing_rows() -> None:
    wanted = logits(0, 4)
    assert "4 of 4" in (difference(wanted * torch.nan, wanted, torch.float32) or "")
    said = difference(wanted[:3], wanted, torch.float32)
    assert said == "(3, 200) logits come back where (4, 200) should"


def decided(
    monkeypatch: pytest.MonkeyPatch, mine: str | None, *, first: bool = False, others: bool = False
) -> str | None:
    """The decision of a rank that found ``mine``, where other ranks may have seen a mismatch."""
    monkeypatch.setattr(trial, "packed_output_mismatch", lambda _worker: mine)
    monkeypatch.setattr(trial, "host_broadcast_from_rank0", lambda: lambda _mine: [int(first)])
    peers = double(Peers, of_all=lambda *numbers: [list(numbers), [int(others)]])
    monkeypatch.setattr(trial, "peers", lambda: peers)
    return trial.packed_output_mismatch_on_any_rank(None)


def test_trial_ranks_decide_as_rank_0_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, None) is None
    assert decided(monkeypatch, "rows differ", first=True) == "rows differ"
    assert decided(monkeypatch, "rows differ") is None
    assert decided(monkeypatch, None, first=True) == "the rows of another rank differ"


def test_trial_mismatch_on_one_data_parallel_rank_is_one_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert decided(monkeypatch, None, others=True) == "the rows of another rank differ"


def test_trial_that_raises_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_worker: object) -> str | None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(trial, "packed_output_mismatch", fail)
    found = trial.packed_output_mismatch_on_any_rank(None)
    assert found == "a packed batch failed with RuntimeError: no kernel"

"""Measurements of a draft distribution, versus float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.draft_layer import MAX_MARGIN, known_measurement, measure

#: Everything that is measured from logits alone.
NAMES = ("margin", "entropy_top3", "entropy_top1000")


def entropy_by_hand(probs: list[float]) -> float:
    return -sum(p * math.log(p) for p in probs if p > 0)


def probs_by_hand(logits: torch.Tensor) -> list[float]:
    """Softmax in float64, largest first."""
    weights = [math.exp(x) for x in logits.double().tolist()]
    return sorted((w / sum(weights) for w in weights), reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 4),
    vocab=st.integers(1, 40),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_measurements_match_float64(
    dtype: torch.dtype, seed: int, batch: int, vocab: int, masked: float
) -> None:
    """Masked tokens (-inf) have probability zero; all but the last one may be."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, vocab, generator=generator) * 5).to(dtype)
    gone = torch.rand(batch, vocab, generator=generator) < masked
    gone[:, -1] = False
    logits = logits.masked_fill(gone, -math.inf)
    stats = measure(logits, NAMES)
    for b in range(batch):
        p = probs_by_hand(logits[b])
        best, second = (p + p[:1])[:2]  # a token without a rival is its own
        margin = math.log(best / second) if second > 0 else MAX_MARGIN
        assert stats["prob"][b].item() == pytest.approx(best, abs=1e-5)
        assert stats["entropy"][b].item() == pytest.approx(entropy_by_hand(p), abs=1e-4)
        assert stats["margin"][b].item() == pytest.approx(margin, abs=1e-4)
        # Eq. 7 of the paper: the cut tail is dropped, not spread; behind the end is nothing to cut.
        assert stats["entropy_top3"][b].item() == pytest.approx(entropy_by_hand(p[:3]), abs=1e-4)
        assert stats["entropy_top1000"][b].item() == pytest.approx(entropy_by_hand(p), abs=1e-4)


@given(
    names=st.lists(st.sampled_from(NAMES), unique=True),
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 20),
)
def test_one_call_with_several_names_equals_separate_calls(
    names: list[str], seed: int, vocab: int
) -> None:
    """They share one sort, which must not show."""
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    together = measure(logits, names)
    assert set(together) == {"prob", "entropy", *names}
    for name in names:
        assert torch.equal(together[name], measure(logits, [name])[name])


def test_names_are_known_exactly_when_something_can_supply_them() -> None:
    for name in (*NAMES, "prob", "entropy", "rank"):
        assert known_measurement(name), name
    for name in ("", "joint", "entropy_top", "entropy_topk", "entropy_top5x", "Margin", "hidden"):
        assert not known_measurement(name), name

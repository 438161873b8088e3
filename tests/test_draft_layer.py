"""What is measured about a draft distribution, against float64 by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.draft_layer import MAX_MARGIN, TOPK_PROBS, known_measurement, measure

#: Everything that is measured from logits alone.
NAMES = ("margin", "topk_prob", "entropy_top3", "entropy_top1000")


def entropy_by_hand(probs: list[float]) -> float:
    return -sum(p * math.log(p) for p in probs if p > 0)


def probs_by_hand(logits: torch.Tensor) -> list[float]:
    """Softmax in float64, largest first."""
    weights = [math.exp(x) for x in logits.double().tolist()]
    return sorted((w / sum(weights) for w in weights), reverse=True)


def test_two_equal_logits_give_half_ln_two_and_no_margin() -> None:
    stats = measure(torch.tensor([[0.0, 0.0]]), ["margin"])
    assert stats["prob"].item() == pytest.approx(0.5)
    assert stats["entropy"].item() == pytest.approx(math.log(2))
    assert stats["margin"].item() == 0.0


def test_a_certain_token_has_probability_one_and_no_entropy() -> None:
    """-inf logits (masked tokens) count as probability zero, not as nan."""
    stats = measure(torch.tensor([[-math.inf, 3.0, -math.inf]]), NAMES)
    assert stats["prob"].tolist() == [1.0]
    assert stats["entropy"].tolist() == stats["entropy_top3"].tolist() == [0.0]
    assert stats["margin"].tolist() == [MAX_MARGIN]
    assert stats["topk_prob"].tolist() == [[1.0] + [0.0] * (TOPK_PROBS - 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 2**31), batch=st.integers(0, 4), vocab=st.integers(2, 40))
def test_measurements_match_float64(dtype: torch.dtype, seed: int, batch: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, vocab, generator=generator) * 5).to(dtype)
    stats = measure(logits, NAMES)
    assert stats["topk_prob"].shape == (batch, TOPK_PROBS)
    for b in range(batch):
        p = probs_by_hand(logits[b])
        assert stats["prob"][b].item() == pytest.approx(p[0], abs=1e-5)
        assert stats["entropy"][b].item() == pytest.approx(entropy_by_hand(p), abs=1e-4)
        assert stats["margin"][b].item() == pytest.approx(math.log(p[0] / p[1]), abs=1e-4)
        padded = (p + [0.0] * TOPK_PROBS)[:TOPK_PROBS]
        assert stats["topk_prob"][b].tolist() == pytest.approx(padded, abs=1e-5)
        # Eq. 7 of the paper: the cut tail is dropped, not spread.
        assert stats["entropy_top3"][b].item() == pytest.approx(entropy_by_hand(p[:3]), abs=1e-4)


def test_a_cut_behind_the_vocabulary_cuts_nothing() -> None:
    stats = measure(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), ["entropy_top4", "entropy_top1000"])
    assert stats["entropy_top4"].item() == pytest.approx(stats["entropy"].item())
    assert stats["entropy_top1000"].item() == pytest.approx(stats["entropy"].item())


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


def test_the_hidden_state_passes_through_when_asked_for() -> None:
    logits, hidden = torch.zeros(2, 4), torch.rand(2, 3)
    assert measure(logits, ["hidden"], hidden=hidden)["hidden"] is hidden
    assert "hidden" not in measure(logits, hidden=hidden)


def test_a_hidden_state_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no hidden state"):
        measure(torch.zeros(2, 4), ["hidden"])


def test_names_are_known_exactly_when_something_can_supply_them() -> None:
    for name in (*NAMES, "prob", "entropy", "hidden"):
        assert known_measurement(name), name
    for name in ("", "joint", "entropy_top", "entropy_topk", "entropy_top5x", "Margin"):
        assert not known_measurement(name), name

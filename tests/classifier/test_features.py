"""P and H of a draft distribution, against float64 by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.classifier.features import SERVED, FeatureSpec, feature_matrix, token_stats
from sglang_c2t.config import ConfigError


def test_two_equal_logits_give_half_and_ln_two() -> None:
    stats = token_stats(torch.tensor([[0.0, 0.0]]))
    assert stats.prob.item() == pytest.approx(0.5)
    assert stats.entropy.item() == pytest.approx(math.log(2))


def test_a_certain_token_has_probability_one_and_no_entropy() -> None:
    """-inf logits (masked tokens) count as probability zero, not as nan."""
    stats = token_stats(torch.tensor([[-math.inf, 3.0, -math.inf]]))
    assert stats.prob.tolist() == [1.0]
    assert stats.entropy.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 2**31), batch=st.integers(0, 4), vocab=st.integers(1, 40))
def test_stats_match_float64(dtype: torch.dtype, seed: int, batch: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, vocab, generator=generator) * 5).to(dtype)
    stats = token_stats(logits)
    for row, prob, entropy in zip(logits.double(), stats.prob, stats.entropy, strict=True):
        p = torch.softmax(row, dim=-1)
        assert prob.item() == pytest.approx(p.max().item(), abs=1e-5)
        assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-4)


def test_top_m_entropy_sums_the_largest_probabilities_without_renormalising() -> None:
    """Eq. 3 of the paper: the cut tail is dropped, not spread."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    p = torch.softmax(logits.double(), dim=-1)[0, :2]
    stats = token_stats(logits, entropy_topk=2)
    assert stats.entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)


def test_features_stand_in_the_order_the_spec_names() -> None:
    matrix = feature_matrix(torch.tensor([0.25]), torch.tensor([1.5]), 3)
    assert SERVED.names == ("joint", "entropy", "depth")
    assert matrix.tolist() == [[0.25, 1.5, 3.0]]


def test_a_spec_with_unknown_fields_is_refused() -> None:
    card = {**SERVED.to_card(), "margin": True}
    with pytest.raises(ConfigError, match="written by another version"):
        FeatureSpec.from_card(card, source="test")

"""Calibration: a known temperature is found again, isotonic regression keeps its promises."""

from collections import defaultdict

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_c2t.classifier.calibration import MAX_KNOTS, Isotonic, fit_isotonic, fit_temperature
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.scores import expected_calibration_error

# (confidence, label) of a few tokens; values repeat.
TOKENS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.3, 0.30001, 0.7, 1.0]), st.integers(0, 1)),
    min_size=2,
    max_size=MAX_KNOTS,
)


def overconfident(n: int, temperature: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose labels are drawn from sigmoid(logits / temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, generator=generator)
    labels = torch.rand(n, generator=generator) < torch.sigmoid(logits / temperature)
    return logits, labels.float()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
def test_fit_temperature_finds_a_known_temperature(temperature: float) -> None:
    """Within 15 %; over 200 seeds the largest error was 8.4 %, at T = 4."""
    found = fit_temperature(*overconfident(20_000, temperature))
    assert found == pytest.approx(temperature, rel=0.15)


@given(TOKENS)
def test_fit_isotonic_gives_each_block_its_share(tokens: list[tuple[float, int]]) -> None:
    """Against pooling by hand: neighbours out of order merge until none are left.

    So the calibration error on the data it was fitted to is zero, and never got worse.
    """
    confidence, labels = torch.tensor(tokens).T
    assume(len(set(confidence.tolist())) > 1)
    calibrated = fit_isotonic(confidence, labels)(confidence)

    pools: dict[float, list[int]] = defaultdict(list)
    for c, label in tokens:
        pools[c].append(label)
    blocks: list[tuple[list[float], list[int]]] = []  # confidences, labels
    for c in sorted(pools):
        blocks.append(([c], pools[c]))
        while len(blocks) > 1 and mean(blocks[-2][1]) >= mean(blocks[-1][1]):
            last = blocks.pop()
            blocks[-1] = (blocks[-1][0] + last[0], blocks[-1][1] + last[1])
    share = {c: mean(block[1]) for block in blocks for c in block[0]}
    assert calibrated.tolist() == pytest.approx([share[c] for c, _ in tokens], abs=1e-6)
    assert expected_calibration_error(calibrated, labels) < 1e-6


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def test_fit_isotonic_has_few_knots() -> None:
    """ECE on its own data fell from 0.18 to at most 0.007 over 50 seeds."""
    logits, labels = overconfident(20_000, 4.0)
    confidence = torch.sigmoid(logits)
    isotonic = fit_isotonic(confidence, labels)
    assert len(isotonic.x) <= MAX_KNOTS
    assert bool((isotonic.x.diff() > 0).all())
    assert bool((isotonic.y.diff() >= 0).all())
    assert expected_calibration_error(confidence, labels) > 0.1
    assert expected_calibration_error(isotonic(confidence), labels) < 0.02


def test_isotonic_is_linear_between_knots() -> None:
    isotonic = Isotonic(torch.tensor([0.2, 0.6]), torch.tensor([0.1, 0.5]))
    assert isotonic(torch.tensor([[0.0, 0.2], [0.3, 0.9]])).flatten().tolist() == pytest.approx(
        [0.1, 0.1, 0.2, 0.5]
    )


def test_isotonic_at_a_knot_is_exact() -> None:
    """Else tokens of one block get two confidences, which two bins of the ECE may part.

    In float32 1/7 + (2/5 - 1/7) is 0.39999998, one bin below 2/5.
    """
    x, y = torch.tensor([0.0, 0.3, 0.7]), torch.tensor([1 / 7, 2 / 5, 2 / 5])
    assert torch.equal(Isotonic(x, y)(x), y)
    labels = torch.tensor([1.0] + [0.0] * 6 + [1, 1, 0, 0, 0] + [1, 1, 0, 0, 0])
    tokens = torch.tensor([0.0] * 7 + [0.3] * 5 + [0.7] * 5)
    calibrated = fit_isotonic(tokens, labels)(tokens)
    assert calibrated.unique().tolist() == torch.tensor([1 / 7, 2 / 5]).tolist()


def test_fit_isotonic_of_equal_confidences_is_refused() -> None:
    with pytest.raises(ConfigError, match="all confidences are equal"):
        fit_isotonic(torch.full((5,), 0.3), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]))

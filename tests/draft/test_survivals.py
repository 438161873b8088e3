"""The twins of estimators on a device say what the estimators say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.draft.survivals import DeviceSurvival
from sglang_c2t.plan.survival import OneSlope, Survival, as_probabilities
from sglang_c2t.tree import Trees

DEPTH = 4


def of_chains(twin: DeviceSurvival, confidences: torch.Tensor) -> torch.Tensor:
    """Returns the kernel's outputs and its inputs."""
    out, kept = torch.empty(2, *confidences.shape).unbind()
    twin.of_chains(confidences, out=out, kept=kept)
    assert kept.shape == confidences.shape
    return out


def taught(kind: type, rng: np.random.Generator) -> Survival | OneSlope:
    estimator: Survival | OneSlope = kind(DEPTH)
    for _ in range(OneSlope.EVERY):  # so many steps until the other one learns at all
        drafts = rng.integers(0, DEPTH + 1, 20)
        correct = np.minimum(drafts, rng.integers(0, DEPTH + 1, 20))
        estimator.learn(rng.uniform(0, 1, (20, DEPTH)), drafts, correct)
    return estimator


@pytest.mark.parametrize("kind", [Survival, OneSlope])
@given(st.integers(0, 2**32 - 1), st.integers(1, DEPTH))
def test_device_survival_equals_its_estimator(kind: type, seed: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    estimator = kind(DEPTH)
    twin = DeviceSurvival(estimator, "cpu")
    for learnt in (estimator, taught(kind, rng)):
        twin.refresh(learnt)
        # As float32 has them: nearest to 1, log odds would differ by more than rounding.
        drawn = np.concatenate([rng.uniform(0, 1, (9, layers)), np.full((1, layers), 1e-7)])
        confidences = torch.tensor(drawn, dtype=torch.float32)
        found = of_chains(twin, confidences).numpy()
        expected = learnt.of_chains(confidences.numpy().astype(np.float64))
        assert found == pytest.approx(expected, abs=1e-5)
        assert (np.diff(found, axis=1) <= 1e-7).all(), "survival falls"


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 12))
def test_device_survival_of_nodes_equals_chains_of_their_paths(
    seed: int, batch: int, drafts: int
) -> None:
    rng = np.random.default_rng(seed)
    estimator = taught(Survival, rng)
    twin = DeviceSurvival(estimator, "cpu")
    parents = np.full((batch, drafts + 2), -1)  # the last is padding
    depth, least = np.zeros_like(parents), np.full(parents.shape, -np.inf)
    least[:, 0] = np.inf
    expected = np.ones(parents.shape)
    for b in range(batch):
        survivals: list[list[float]] = [[]]  # along the path of each node
        for node in range(1, drafts + 1):
            above = [p for p in range(node) if depth[b, p] < DEPTH]
            parents[b, node] = parent = rng.choice(above)
            depth[b, node] = depth[b, parent] + 1
            least[b, node] = np.float32(min(rng.uniform(), least[b, parent]))
            own = float(estimator(depth[b, node], least[b, node]))
            survivals.append([*survivals[parent], own])
            expected[b, node] = min(survivals[-1])
    tree = Trees(*(torch.tensor(values) for values in (parents, parents, depth, parents, parents)))
    found = twin.of_nodes(torch.tensor(least, dtype=torch.float32), tree).numpy()
    live = depth > 0
    assert found[live] == pytest.approx(expected[live], abs=1e-5)
    above = np.take_along_axis(found, np.maximum(parents, 0), axis=1)
    assert (found <= above)[live].all(), "exactly, or the best of a batch would be no trees"


@pytest.mark.parametrize("kind", [Survival, OneSlope])
def test_device_survival_is_finite_for_probabilities_0_and_1(kind: type) -> None:
    twin = DeviceSurvival(kind(DEPTH), "cpu")
    found = of_chains(twin, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.isfinite(found).all()
    assert (found[0] < found[1]).all()


@pytest.mark.parametrize("kind", [Survival, OneSlope])
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf, -1.0, 1.0 + 1e-6])
def test_device_survival_of_a_confidence_that_is_no_probability_is_a_number(
    kind: type, strange: float
) -> None:
    """By a kernel, too: of what is no number it would keep drafts and leave gaps."""
    said = torch.tensor([[0.9, strange, 0.8], [strange, 0.9, 0.8]], dtype=torch.float32)
    estimator = kind(DEPTH)
    found = of_chains(DeviceSurvival(estimator, "cpu"), said).numpy()
    nearest, _ = as_probabilities(said.numpy())
    assert found == pytest.approx(estimator.of_chains(nearest), abs=1e-5)

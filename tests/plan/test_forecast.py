"""Continuations are drawn from what came next, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.plan.forecast import Continuations

DEPTH = 4


def chains(rng: np.random.Generator, batch: int, layers: int) -> np.ndarray:
    return rng.uniform(0.01, 0.99, (batch, layers))


@given(st.integers(0, 2**32 - 1), st.integers(1, DEPTH), st.sampled_from([1, 4, 16]))
def test_a_chain_goes_on_as_one_like_it_did(seed: int, known: int, samples: int) -> None:
    """Each drawn confidence followed, at its depth, one in the same bin as that before it."""
    rng = np.random.default_rng(seed)
    seen = Continuations(DEPTH, num_bins=3, memory=1000)
    learnt = chains(rng, 30, DEPTH)
    for part in np.split(learnt, [7, 8]):
        seen.observe(part)
    bins = lambda values: np.digitize(np.log(values / (1 - values)), [-2.0, 2.0])  # noqa: E731
    drawn = seen.drawn(chains(rng, 5, known), samples)
    assert drawn.shape == (5 * samples, DEPTH)
    for depth in range(known, DEPTH):
        for last, found in drawn[:, depth - 1 : depth + 1]:
            before = learnt[:, depth - 1]
            followers = learnt[bins(before) == bins(np.array(last)), depth]
            assert found in followers if len(followers) else found == last


def test_spread_is_kept_and_evenly_drawn() -> None:
    """Half of the chains went well and half did not: so do the draws."""
    seen = Continuations(2)
    seen.observe(np.array([[0.8, 0.9], [0.8, 0.1]] * 8))
    drawn = seen.drawn(np.array([[0.8]]), 16)
    assert sorted(drawn[:, 1]) == pytest.approx([0.1] * 8 + [0.9] * 8)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    seen = Continuations(2, memory=4)
    seen.observe(np.array([[0.8, 0.1]] * 4))
    seen.observe(np.array([[0.8, 0.9]] * 4))
    assert (seen.drawn(np.array([[0.8]]), 8)[:, 1] == 0.9).all()


def test_a_tree_goes_on_with_whole_layers_by_the_best_of_the_last() -> None:
    seen = Continuations(3, width=2)
    sure, unsure = [[0.9, 0.5], [0.8, 0.4], [0.7, 0.0]], [[0.2, 0.1], [0.1, 0.0], [0.0, 0.0]]
    seen.observe(np.array([sure, unsure]))
    assert seen.drawn(np.array([sure[:1], unsure[:1]]), 2).tolist() == [sure, sure, unsure, unsure]
    strange = [0.99, 0.4]
    assert seen.drawn(np.array([[strange]]), 1).tolist() == [[strange] * 3], "nothing like it"

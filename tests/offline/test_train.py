"""Training: the network learns a known rule, repeatably, and poor data is refused."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.model import num_parameters
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.offline.scores import auc
from sglang_c2t.offline.train import (
    FINE_TUNE,
    RECIPES,
    TrainSettings,
    split_by_group,
    train_classifier,
)
from tests.recordings import random_chains, recording
from tests.refusals import refused

BRIEF = TrainSettings(steps=2)


@pytest.fixture(scope="module")
def small() -> Recording:
    """1200 tokens of 30 prompts."""
    return recording(random_chains(30, roots=10, depth=4))


def weights(classifier: Classifier) -> list[float]:
    return torch.cat([p.flatten() for p in classifier.net.parameters()]).tolist()


# -- what is learnt -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["c2t", "c2t-log"])
def test_train_learns_a_known_rule(recipe: str) -> None:
    """Confidence must follow P. Over ten seeds the largest deviation was 0.09."""
    data = recording(random_chains(100, roots=200, depth=3))
    classifier = train_classifier(data, RECIPES[recipe], settings=TrainSettings(steps=560))
    probe = torch.linspace(0.3, 0.9, 7)
    layer = DraftLayer(2, probe.sqrt(), probe, 0.5 - probe.sqrt().log(), probe > 0)
    assert (classifier.confidence(layer) - probe).abs().max().item() < 0.15
    assert classifier.training["tokens"] == 60_000


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_train_with_every_recipe(small: Recording, name: str) -> None:
    recipe = RECIPES[name]
    classifier = train_classifier(small, recipe, settings=BRIEF)
    confidence = classifier.confidence(small.layer(classifier.features.needs))
    assert confidence.shape == (small.num_nodes,)
    assert bool(((confidence >= 0) & (confidence <= 1)).all())
    assert classifier.features.names == recipe.names
    assert classifier.training["parameters"] == num_parameters(classifier.net)
    assert classifier.training["recipe"]["names"] == recipe.names


def test_train_with_the_same_seed_is_repeatable(small: Recording) -> None:
    def trained(seed: int) -> list[float]:
        return weights(train_classifier(small, settings=replace(BRIEF, seed=seed)))

    assert trained(3) == trained(3) != trained(4)


def test_train_card_holds_the_calibration_error_of_heldout_tokens() -> None:
    """Mostly rejected tokens, sampled down for training: the confidence is too high. Over ten
    seeds the error was 0.13 or more.
    """
    data = recording(random_chains(200, roots=5, depth=12))
    settings = TrainSettings(steps=30, heldout_share=0.5)
    assert 0.1 < train_classifier(data, settings=settings).training["heldout_ece"] < 1


# -- which tokens -------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "balanced"), [(2, False), (12, True)])
def test_train_samples_down_a_majority_of_rejected_tokens(depth: int, balanced: bool) -> None:
    """About 72 % of the tokens are accepted at depths 1 and 2, 31 % down to depth 12."""
    data = recording(random_chains(20, roots=10, depth=depth))
    settings = replace(BRIEF, heldout_share=0.5)
    facts = train_classifier(data, settings=settings).training
    everything = train_classifier(data, RECIPES["c2t-log"], settings=settings).training
    assert (facts["trained_on"] < everything["trained_on"]) == balanced
    assert everything["trained_on"] + everything["heldout_tokens"] == data.num_nodes


@given(
    group=st.lists(st.integers(0, 5), min_size=2, max_size=30).filter(lambda g: len(set(g)) > 1),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_train_split_by_group_is_disjoint(group: list[int], share: float, seed: int) -> None:
    rows = torch.tensor(group)
    train, heldout = split_by_group(rows, share, torch.Generator().manual_seed(seed))
    assert sorted((*train.tolist(), *heldout.tolist())) == list(range(len(group)))
    assert not set(rows[train].tolist()) & set(rows[heldout].tolist())
    assert len(set(rows[heldout].tolist())) == max(1, round(share * len(set(group))))


def test_auc_equals_the_share_of_ordered_pairs() -> None:
    """Against the definition: pairs (accepted, rejected) in the right order, ties half."""
    g = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 6, (40,), generator=g).float()
    labels = torch.randint(0, 2, (40,), generator=g).float()
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, x in zip(scores, labels, strict=True)
        for b, y in zip(scores, labels, strict=True)
        if x == 1 and y == 0
    ]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(auc(scores, torch.ones(40)))


# -- fine-tuning --------------------------------------------------------------------------


def test_train_fine_tune_starts_from_the_given_weights(small: Recording) -> None:
    start = train_classifier(small, settings=BRIEF)
    before = weights(start)
    still = train_classifier(small, settings=replace(BRIEF, learning_rate=1e-12), start=start)
    assert weights(still) == pytest.approx(before, abs=1e-8)
    moved = train_classifier(small, settings=replace(FINE_TUNE, steps=20), start=start)
    assert 0 < max(abs(a - b) for a, b in zip(weights(moved), before, strict=True)) < 0.05
    assert weights(start) == before
    assert moved.training["settings"]["learning_rate"] == FINE_TUNE.learning_rate == 1e-4
    assert moved.training["fine_tuned"] is True


def test_train_fine_tune_of_other_features_is_refused(small: Recording) -> None:
    start = train_classifier(small, settings=BRIEF)
    with refused("reads joint, entropy, depth, the recipe log_joint, ent"):
        train_classifier(small, RECIPES["c2t-log"], start=start)


# -- refusals -----------------------------------------------------------------------------


def spoilt(data: Recording, name: str, value: float, rows: slice = slice(None)) -> Recording:
    column = data.nodes[name].clone()
    column[rows] = value
    return replace(data, nodes={**data.nodes, name: column})


@pytest.mark.parametrize(
    ("name", "value", "rows", "said"),
    [
        ("accept", 1, slice(None), "and 0 rejected; record more prompts"),
        ("accept", 0, slice(None), "got 0 accepted and"),
        ("entropy", math.nan, slice(7, 9), "2 of 1200 recorded tokens hold values that are not"),
        ("joint", math.inf, slice(0, 1), "1 of 1200 recorded tokens hold values that are not"),
        ("entropy", 3e38, slice(None), "training diverged: the loss is"),
    ],
)
def test_train_recording_without_labels_or_with_nan_is_refused(
    small: Recording, name: str, value: float, rows: slice, said: str
) -> None:
    with refused(said):
        train_classifier(spoilt(small, name, value, rows), settings=BRIEF)


def test_train_takes_as_many_steps_on_a_small_recording_as_on_a_large_one(
    small: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many epochs these are."""
    taken: list[int] = []
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *_, **__: taken.append(1))
    tenth = small.select(small.drafts["prompt"] < 3)
    for data, num_steps in ((small, 7), (tenth, 7), (tenth, 1)):
        taken.clear()
        train_classifier(data, settings=TrainSettings(steps=num_steps, batch_size=100))
        assert len(taken) == num_steps

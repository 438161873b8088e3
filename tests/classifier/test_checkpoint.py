"""Classifier files: a round trip keeps every bit, a file that does not fit is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_c2t.classifier.checkpoint import Classifier, load_classifier, save_classifier
from sglang_c2t.classifier.features import SERVED
from sglang_c2t.classifier.model import ConfidenceNet, num_parameters
from sglang_c2t.config import ConfigError


@pytest.fixture
def saved(tmp_path):
    """A saved, untrained classifier."""
    torch.manual_seed(0)
    path = tmp_path / "mine.safetensors"
    save_classifier(Classifier(ConfidenceNet(), SERVED, {"note": "test"}), path)
    return path


def edit_card(path, **changes) -> None:
    card_path = path.with_suffix(".json")
    card_path.write_text(json.dumps({**json.loads(card_path.read_text()), **changes}))


def test_the_network_has_241_parameters() -> None:
    assert num_parameters(ConfidenceNet()) == 241


def test_a_saved_classifier_loads_to_the_same_confidences(saved) -> None:
    torch.manual_seed(0)
    original = Classifier(ConfidenceNet(), SERVED, {})
    joint, entropy = torch.rand(50), torch.rand(50) * 8
    loaded = load_classifier(saved)
    assert torch.equal(loaded.confidence(joint, entropy, 3), original.confidence(joint, entropy, 3))
    assert loaded.training == {"note": "test"}


def test_nothing_but_the_two_files_is_left_behind(saved) -> None:
    assert sorted(p.name for p in saved.parent.iterdir()) == ["mine.json", "mine.safetensors"]


@pytest.mark.parametrize(
    ("feature", "value"),
    [("entropy", "top1000"), ("joint", "log"), ("depth_of_first_token", 0), ("names", ["joint"])],
)
def test_other_features_are_refused_by_name(saved, feature: str, value: object) -> None:
    edit_card(saved, features={**SERVED.to_card(), feature: value})
    with pytest.raises(ConfigError, match=f"other features than this server measures: {feature}"):
        load_classifier(saved)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "gguf"}, "card says 'gguf'"),
        ({"version": 2}, "version 2, this version reads"),
        ({"hidden_size": 0}, "hidden_size must be"),
        ({"hidden_size": 47}, "do not fit the card"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(saved, changes: dict, said: str) -> None:
    edit_card(saved, **changes)
    with pytest.raises(ConfigError, match=said):
        load_classifier(saved)


def test_broken_files_are_refused_in_one_line(saved) -> None:
    weights = load_file(saved)
    saved.write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="cannot read weights"):
        load_classifier(saved)
    save_file({**weights, "out.bias": torch.tensor([float("nan")])}, saved)
    with pytest.raises(ConfigError, match="not finite"):
        load_classifier(saved)
    saved.unlink()
    with pytest.raises(ConfigError, match="cannot read weights"):
        load_classifier(saved)
    saved.with_suffix(".json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read its card"):
        load_classifier(saved)
    saved.with_suffix(".json").write_text("{}")
    with pytest.raises(ConfigError, match="must hold the keys"):
        load_classifier(saved)


def test_a_wrong_suffix_is_refused_before_writing(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        save_classifier(Classifier(ConfidenceNet(), SERVED, {}), tmp_path / "weights.bin")
    assert list(tmp_path.iterdir()) == []

"""Classifier files: a round trip keeps every bit, a file that does not fit is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_c2t.classifier.checkpoint import Classifier, load_classifier, save_classifier
from sglang_c2t.classifier.features import CONVENTIONS, FeatureSpec
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import ConfigError
from tests.recordings import random_chains, recording
from tests.refusals import refused


def randomised(net: torch.nn.Module) -> Any:
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return net


def untrained() -> Classifier:
    return Classifier(randomised(ConfidenceNet()), CONVENTIONS, {"n": 1})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved, untrained classifier."""
    path = tmp_path / "mine.safetensors"
    save_classifier(untrained(), path)
    return path


@pytest.fixture(scope="module")
def tokens() -> Recording:
    """Tokens with every measurement."""
    return recording(random_chains(3, roots=5, depth=6))


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (ConfidenceNet(), ("joint", "entropy", "depth")),
        (ConfidenceNet(2, [5]), ("margin", "log_joint")),
        (ConfidenceNet(1, [64, 32]), ("prob",)),
    ],
)
def test_classifier_file_restores_the_confidences(
    tmp_path: Path, tokens: Recording, net: torch.nn.Module, names: tuple[str, ...]
) -> None:
    spec = FeatureSpec(names=names)
    original = Classifier(randomised(net), spec, {"note": "test"})
    save_classifier(original, tmp_path / "mine.safetensors")
    loaded = load_classifier(tmp_path / "mine.safetensors")
    layer = tokens.layer()
    assert torch.equal(loaded.confidence(layer), original.confidence(layer))
    assert loaded.features == spec
    assert (loaded.training, loaded.name) == ({"note": "test"}, "mine.safetensors")


# -- refusals -----------------------------------------------------------------------------


def card(**changes: object) -> Callable[[Path], object]:
    """A spoiler: other values in the card; None drops the key."""

    def spoil(path: Path) -> None:
        card = {**json.loads(path.with_suffix(".json").read_text()), **changes}
        text = json.dumps({key: value for key, value in card.items() if value is not None})
        path.with_suffix(".json").write_text(text)

    return spoil


def card_text(text: str) -> Callable[[Path], object]:
    return lambda path: path.with_suffix(".json").write_text(text)


def weights(**changes: torch.Tensor | list[float]) -> Callable[[Path], object]:
    """A spoiler: other tensors, or more of them."""
    tensors = {name: torch.as_tensor(values) for name, values in changes.items()}
    return lambda path: save_file({**load_file(path), **tensors}, path)


#: What ``train --calibration isotonic`` of earlier versions added.
KNOTS = {"calibration.x": [0.1, 0.2], "calibration.y": [0.1, 0.2]}
SIZES = "sizes must be a list of whole numbers >= 1, 16 at most, got"
READS = "this version reads ('c2t-classifier', 2)"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (card(format="gguf"), f"card says ('gguf', 2), {READS}"),
        (card(version=1), "card says ('c2t-classifier', 1)"),
        (card(kind="forest"), "kind must be mlp, got 'forest'"),
        (card(sizes=[0]), f"{SIZES} [0]"),
        (card(sizes=48), f"{SIZES} 48"),
        (card(sizes=[47]), "do not fit the card"),
        (card(label="accepts"), "label survives"),
        (card(features=3), "'features' must be an object, got 3"),
        (card(features={**CONVENTIONS.to_card(), "names": ["joint"]}), "do not fit the card"),
        (card(training=None), "card mine.json must hold the keys"),
        (card(training=[3]), "training an object"),
        (card_text("{"), "cannot read its card mine.json"),
        (card_text("[]"), READS),
        (lambda path: path.with_suffix(".json").unlink(), "cannot read its card mine.json"),
        (lambda path: path.write_bytes(b"not safetensors"), "cannot read weights"),
        (lambda path: path.unlink(), "cannot read weights"),
        (weights(more=[0.0]), "do not fit the card"),
        (weights(**KNOTS), "do not fit the card"),
        (weights(**{"out.bias": [math.nan]}), "weights hold values that are not finite"),
    ],
)
def test_classifier_file_that_is_invalid_is_refused(
    saved: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(saved)
    with refused(said):
        load_classifier(saved)


def test_classifier_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A folder stands where the weights should go; a file where the folder should be."""
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        save_classifier(untrained(), tmp_path / "weights.bin")
    for path in (tmp_path / "a.safetensors", tmp_path / "file" / "b.safetensors"):
        with pytest.raises(ConfigError, match="cannot write classifier") as error:
            save_classifier(untrained(), path)
        assert str(path) in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "file"]

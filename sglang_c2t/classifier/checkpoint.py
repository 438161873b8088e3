"""A classifier on disk: ``NAME.safetensors`` with the weights, ``NAME.json`` the card.

The card says which features the weights were trained on (:class:`FeatureSpec`), the
sizes, and where the training data came from. Loading refuses anything that does not
fit, so that a classifier never reads numbers it was not trained on.

Card, all keys required::

    {"format": "c2t-classifier", "version": 1, "hidden_size": 48,
     "features": {...FeatureSpec...}, "training": {...free form, provenance...}}
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_c2t.classifier.features import SERVED, FeatureSpec, feature_matrix
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.config import ConfigError

FORMAT = "c2t-classifier"
VERSION = 1
DEFAULT_PATH = Path(__file__).parent / "default" / "c2t.safetensors"


@dataclass(frozen=True)
class Classifier:
    """A trained network with the contract of its inputs."""

    net: ConfidenceNet
    features: FeatureSpec
    training: dict[str, Any]

    @torch.inference_mode()
    def confidence(self, joint: Tensor, entropy: Tensor, depth: int | Tensor) -> Tensor:
        """[B] float32 in [0, 1]: how likely the target accepts each token."""
        return torch.sigmoid(self.net(feature_matrix(joint, entropy, depth)))

    def to(self, device: torch.device | str) -> Classifier:
        """The same classifier on ``device``."""
        self.net.to(device)
        return self


def save_classifier(classifier: Classifier, path: str | os.PathLike[str]) -> None:
    """Write weights and card; either file appears only when complete."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ConfigError(f"a classifier file must end in .safetensors, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    card = {
        "format": FORMAT,
        "version": VERSION,
        "hidden_size": classifier.net.hidden.out_features,
        "features": classifier.features.to_card(),
        "training": classifier.training,
    }
    weights = {
        name: t.detach().cpu().contiguous() for name, t in classifier.net.state_dict().items()
    }
    _replace(path, lambda tmp: save_file(weights, tmp))
    text = json.dumps(card, indent=2, sort_keys=True) + "\n"
    _replace(path.with_suffix(".json"), lambda tmp: tmp.write_text(text, encoding="utf-8"))


def load_classifier(name: str | os.PathLike[str]) -> Classifier:
    """Load ``default`` or a file; :class:`ConfigError` says in one line why one is refused."""
    path = DEFAULT_PATH if str(name) == "default" else Path(name)
    source = f"c2t classifier {path}"
    card = _read_card(path.with_suffix(".json"), source)
    features = FeatureSpec.from_card(card["features"], source=source)
    if features != SERVED:
        raise ConfigError(
            f"{source} was trained on other features than this server measures: "
            f"{_difference(features, SERVED)}; train it on recordings of this version"
        )
    hidden_size = card["hidden_size"]
    if not isinstance(hidden_size, int) or hidden_size < 1:
        raise ConfigError(f"{source}: hidden_size must be a whole number >= 1, got {hidden_size!r}")
    net = ConfidenceNet(len(features.names), hidden_size)
    weights = _read_weights(path, source)
    expected = {name: tuple(t.shape) for name, t in net.state_dict().items()}
    got = {name: tuple(t.shape) for name, t in weights.items()}
    if got != expected:
        raise ConfigError(f"{source}: tensors {got} do not fit the card, expected {expected}")
    if not all(torch.isfinite(t).all() for t in weights.values()):
        raise ConfigError(f"{source}: weights hold values that are not finite; train it again")
    net.load_state_dict(weights)
    net.eval().requires_grad_(False)
    return Classifier(net=net, features=features, training=card["training"])


def _read_card(path: Path, source: str) -> dict[str, Any]:
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{source}: cannot read its card {path.name}: {error}") from error
    required = {"format", "version", "hidden_size", "features", "training"}
    if not isinstance(card, dict) or not required <= set(card):
        raise ConfigError(f"{source}: card {path.name} must hold the keys {sorted(required)}")
    if card["format"] != FORMAT or card["version"] != VERSION:
        raise ConfigError(
            f"{source}: card says {card['format']!r} version {card['version']!r}, "
            f"this version reads {FORMAT!r} version {VERSION}"
        )
    return card


def _read_weights(path: Path, source: str) -> dict[str, Tensor]:
    try:
        return {name: t.float() for name, t in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source}: cannot read weights: {error}") from error


def _difference(got: FeatureSpec, served: FeatureSpec) -> str:
    """The fields that differ, as ``entropy 'top1000' (served: 'full')``."""
    a, b = got.to_card(), served.to_card()
    return ", ".join(f"{key} {a[key]!r} (served: {b[key]!r})" for key in a if a[key] != b[key])


def _replace(path: Path, write: Any) -> None:
    """Write through a temporary name, so a reader never sees half a file."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(tmp)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)

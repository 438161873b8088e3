"""A classifier on disk: ``NAME.safetensors`` with the weights, ``NAME.json`` the card.

The card holds the features that the weights were trained on (:class:`FeatureSpec`), the sizes, and
the origin of the training data. Loading refuses what does not fit, so that a classifier never reads
features it was not trained on.

Card, all keys required::

    {"format": "c2t-classifier", "version": 2, "kind": "mlp", "sizes": [48],
     "label": "survives", "features": {...FeatureSpec...}, "training": {...provenance...}}

``sizes`` are those of the hidden layers. ``label`` is the event that the confidence predicts: the
token and all before it are accepted. ``training`` holds, among others, the ``origins`` of the
recordings, with their pairs (:mod:`~sglang_c2t.classifier.pair`).

The package ships classifiers trained on several pairs, and in one folder per pair those of one.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_c2t.checks import MAX_NUMBER, ConfigError, is_whole, parse_json, shown
from sglang_c2t.classifier.features import FeatureSpec, feature_matrix
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.classifier.pair import Pair, learnt_from
from sglang_c2t.classifier.tensors import require_safetensors
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.files import read_text, write_whole

FORMAT = "c2t-classifier"
VERSION = 2
SHIPPED = Path(__file__).parent / "default"
#: Kind and label in every card.
KIND, LABEL = "mlp", "survives"

#: Most bytes of weights and of their header. Weights for hidden states may have some MB.
LARGEST_WEIGHTS = 1 << 28
LARGEST_HEADER = 1 << 16

#: Most hidden layers, and the largest measurement, that of a hidden state.
MOST_LAYERS = 16
LARGEST_INPUT = 1e6


@dataclass
class Classifier:
    """A trained network with the contract of its inputs."""

    net: ConfidenceNet
    features: FeatureSpec
    training: dict[str, Any]
    name: str = ""
    """The name of a shipped classifier, otherwise the name of the file."""

    @torch.inference_mode()
    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B] float32 in [0, 1]: probability that the target accepts each token."""
        return torch.sigmoid(self.net(feature_matrix(self.features.names, layer)))

    def to(self, device: torch.device | str) -> Classifier:
        """Move to ``device``, in place as networks do; a copy while serving would be too late."""
        self.net.to(device)
        return self


def save_classifier(classifier: Classifier, path: str | os.PathLike[str]) -> None:
    """Write weights and card atomically: both or neither. Raises :class:`ConfigError` if the disk
    does not take them.
    """
    path = Path(path)
    require_suffix(path)
    net = classifier.net
    card = {
        "format": FORMAT,
        "version": VERSION,
        "kind": KIND,
        "sizes": net.hidden_sizes,
        "label": LABEL,
        "features": classifier.features.to_card(),
        "training": classifier.training,
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in net.state_dict().items()}
    text = json.dumps(card, indent=2, sort_keys=True) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            {
                path: lambda tmp: save_file(tensors, tmp),
                path.with_suffix(".json"): lambda tmp: tmp.write_text(text, encoding="utf-8"),
            }
        )
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write classifier {path}: {error}") from error


def require_suffix(path: Path) -> None:
    """Refuse a file name for which the loader would find no card."""
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"a classifier file must end in .safetensors, got {shown(str(path), 300)}"
        )


def load_classifier(name: str | os.PathLike[str]) -> Classifier:
    """Load a shipped classifier by its name, or a file. :class:`ConfigError` gives the reason in
    one line.
    """
    found = shipped(str(name))
    path = found or Path(name)
    require_suffix(path)
    source = f"c2t classifier {path}"
    card = _read_card(path.with_suffix(".json"), source)
    features = FeatureSpec.from_card(card["features"], source=source)
    net = _network(card, features, _read_weights(path, source), source)
    return Classifier(
        net=net,
        features=features,
        training=card["training"],
        name=str(name) if found else path.name,
    )


def shipped(name: str) -> Path | None:
    """Return the file of a shipped classifier by its name; ``None`` if there is none."""
    return SHIPPED / f"{name}.safetensors" if name in shipped_names() else None


def shipped_names() -> list[str]:
    """Return the shipped classifiers: ``POLICY``, and ``PAIR/POLICY`` for one pair."""
    files = SHIPPED.rglob("*.safetensors")
    return sorted(file.relative_to(SHIPPED).with_suffix("").as_posix() for file in files)


def shipped_for(pair: Pair | None) -> str | None:
    """Return the folder with the classifiers shipped for a pair; ``None`` if there is none."""
    for card in sorted(SHIPPED.glob("*/*.json")):
        if learnt_from(_read_card(card, f"c2t classifier {card}")["training"], pair) == "this pair":
            return card.parent.name
    return None


def _network(
    card: dict[str, Any], features: FeatureSpec, tensors: dict[str, Tensor], source: str
) -> ConfidenceNet:
    """The network that the card describes, with these weights."""
    sizes = card["sizes"]
    listed = isinstance(sizes, list) and len(sizes) <= MOST_LAYERS
    if not listed or not all(is_whole(size, 1) for size in sizes):
        raise ConfigError(
            f"{source}: sizes must be a list of whole numbers >= 1, {MOST_LAYERS} at most, got "
            f"{shown(sizes)}"
        )
    if card["kind"] != KIND:
        raise ConfigError(f"{source}: kind must be {KIND}, got {shown(card['kind'])}")
    width = len(features.names)
    expected = _shapes(width, sizes)
    got = {name: tuple(t.shape) for name, t in tensors.items()}
    if got != expected:  # before a network is made: sizes may be of any size
        raise ConfigError(
            f"{source}: tensors {shown(got, 300)} do not fit the card, expected "
            f"{shown(expected, 300)}"
        )
    if not all(torch.isfinite(t).all() for t in tensors.values()):
        raise ConfigError(f"{source}: weights hold values that are not finite; train it again")
    if not _stays_finite(tensors, width, layers=len(sizes)):
        raise ConfigError(f"{source}: weights are so large that confidences may overflow")
    net = ConfidenceNet(width, sizes)
    net.load_state_dict(tensors)
    net.eval().requires_grad_(False)
    return net


def _shapes(width: int, sizes: list[int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of such a network."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (inputs, outputs) in enumerate(itertools.pairwise([width, *sizes])):
        shapes |= {
            f"hidden.{number}.weight": (outputs, inputs),
            f"hidden.{number}.bias": (outputs,),
        }
    return shapes | {"out.weight": (1, [width, *sizes][-1]), "out.bias": (1,)}


def _stays_finite(tensors: dict[str, Tensor], width: int, *, layers: int) -> bool:
    """Whether no input within a measurement's limit can overflow float32 in the network. An
    infinity inside would make the confidence nan, with which a gate neither ends nor keeps drafts.
    """
    reach = torch.full((width,), LARGEST_INPUT, dtype=torch.float64)
    for layer in [*(f"hidden.{number}" for number in range(layers)), "out"]:
        weight, bias = (tensors[f"{layer}.{part}"].double().abs() for part in ("weight", "bias"))
        reach = weight @ reach + bias
        if not bool((reach < MAX_NUMBER).all()):  # nan too
            return False
    return True


def _read_card(path: Path, source: str) -> dict[str, Any]:
    try:
        card = parse_json(read_text(path), source="the card")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: cannot read its card {path.name}: {error}") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT or card.get("version") != VERSION:
        found = (card.get("format"), card.get("version")) if isinstance(card, dict) else card
        raise ConfigError(
            f"{source}: card says {shown(found)}, this version reads {(FORMAT, VERSION)!r}; "
            "train it again"
        )
    required = {"kind", "sizes", "label", "features", "training"}
    fits = required <= set(card) and isinstance(card["training"], dict)
    if not fits or card["label"] != LABEL:
        raise ConfigError(
            f"{source}: card {path.name} must hold the keys {sorted(required)}, training an "
            f"object, label {LABEL}"
        )
    return card


def _read_weights(path: Path, source: str) -> dict[str, Tensor]:
    try:
        require_safetensors(path, largest=LARGEST_WEIGHTS, largest_header=LARGEST_HEADER)
        return {name: t.float() for name, t in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source}: cannot read weights: {error}") from error

"""Which pair a classifier learnt from: known by weights, whatever folders are called."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from eval.smollm2 import HEAD
from sglang_c2t.classifier import checkpoint
from sglang_c2t.classifier.checkpoint import (
    Classifier,
    load_classifier,
    save_classifier,
    shipped_for,
    shipped_names,
)
from sglang_c2t.classifier.features import CONVENTIONS
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.classifier.pair import Pair, fingerprint, learnt_from, pair_in

MINE, OTHER = Pair("EAGLE3", "a" * 16, "b" * 16), Pair("EAGLE3", "a" * 16, "c" * 16)


def origin(pair: Pair | None = MINE, **names: Any) -> dict[str, Any]:
    """As a recorder writes it."""
    weights = pair and {"target": pair.target, "draft": pair.draft}
    return {"algorithm": "EAGLE3", "target": "t", "draft": "d", "weights": weights, **names}


# -- weights -------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with two files of weights, a megabyte together, and what is no weight."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        data = bytes(number * place % 251 for place in range(251)) * 2000
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(data)
    (folder / "config.json").write_text("{}")
    return folder


def test_fingerprint_of_a_renamed_copy_is_the_same(model: Path, tmp_path: Path) -> None:
    mine = fingerprint(model)
    assert mine is not None
    assert len(mine) == 16
    copy = shutil.copytree(model, tmp_path / "renamed")
    (copy / "config.json").write_text('{"written_by": "another release"}')
    (copy / "consolidated.safetensors").write_bytes(b"the same weights, by other names")
    assert fingerprint(copy) == mine


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("change", ["trained", "longer", "beginning", "end", "gone"])
def test_fingerprint_of_other_weights_differs(model: Path, number: int, change: str) -> None:
    before = fingerprint(model)
    file = model / f"model-0000{number}-of-00002.safetensors"
    data = file.read_bytes()
    if change == "gone":
        file.unlink()
    else:
        file.write_bytes({
            "trained": data.translate(bytes(value ^ 1 for value in range(256))),
            "longer": data + data[-1:],
            "beginning": b"\xff" + data[1:],
            "end": data[:-1] + b"\xff",
        }[change])  # fmt: skip
    assert fingerprint(model) not in (before, None)


# -- cards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origins", "said"),
    [
        ([origin()], "this pair"),
        ([origin(), origin(target="renamed", topk=8)], "this pair"),
        ([origin(OTHER)], "another pair"),
        ([origin(MINE._replace(target="0"))], "another pair"),
        ([origin(algorithm="EAGLE")], "another pair"),
        ([origin(), origin(OTHER)], "several pairs"),
        ([origin(), origin(None)], "several pairs"),
        ([origin(None, draft="d"), origin(None, draft="e")], "several pairs"),
        ([origin(None)], "an unknown pair"),
        ([], "an unknown pair"),
    ],
)
def test_learnt_from_compares_the_card_with_the_pair(origins: list[Any], said: str) -> None:
    assert learnt_from({"origins": origins}, MINE) == said
    unknown = learnt_from({"origins": origins}, None)
    assert unknown == ("several pairs" if said == "several pairs" else "an unknown pair")


@pytest.mark.parametrize(
    "weights", [None, [], "x", 3, {}, {"target": "a"}, {"target": 1, "draft": "b"},
                {"target": ["a"], "draft": {}}]
)  # fmt: skip
def test_learnt_from_of_odd_cards_is_unknown(weights: Any) -> None:
    odd = {**origin(), "weights": weights}
    assert pair_in(odd) is None
    for origins in ([odd], weights, [weights]):
        assert learnt_from({"origins": origins}, MINE) == "an unknown pair"


# -- what is shipped -----------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped classifiers: one for all, and one of ``MINE``."""
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path)
    for name, origins in {
        "c2t": [origin(), origin(OTHER)],
        "mine/c2t": [origin()],
        "nobody/c2t": [origin(None)],
    }.items():
        training = {"origins": origins, "of": name}
        save_classifier(
            Classifier(ConfidenceNet(), CONVENTIONS, training), tmp_path / f"{name}.safetensors"
        )
    return tmp_path


def test_shipped_for_finds_the_classifier_of_the_pair(shipped: Path) -> None:
    assert [shipped_for(pair) for pair in (MINE, OTHER, None)] == ["mine", None, None]
    assert shipped_names() == ["c2t", "mine/c2t", "nobody/c2t"]
    for name in shipped_names():
        classifier = load_classifier(name)
        assert (classifier.name, classifier.training["of"]) == (name, name)


def test_shipped_classifiers_of_smollm2_learnt_from_the_shipped_head() -> None:
    """A head that is trained further has other calibration: `make classifier` follows it."""
    found = [name for name in shipped_names() if name.startswith("smollm2/")]
    for name in found:
        (one,) = load_classifier(name).training["origins"]
        assert one["weights"]["draft"] == fingerprint(HEAD), "run make classifier"
    assert found

"""The inputs of a classifier: order, logarithms, and what a file may not ask for."""

import math

import pytest
import torch

from sglang_c2t.classifier.features import CONVENTIONS, MIN_PROB, FeatureSpec, feature_matrix
from sglang_c2t.draft_layer import DraftLayer
from tests.refusals import refused


def layer(depth: int | torch.Tensor = 3) -> DraftLayer:
    """Two tokens, the second one impossible."""
    return DraftLayer(
        depth=depth,
        prob=torch.tensor([0.5, 0.0]),
        joint=torch.tensor([0.25, 0.0]),
        entropy=torch.tensor([1.5, 2.0]),
        alive=torch.ones(2, dtype=torch.bool),
        measured={"margin": torch.tensor([0.1, 0.2], dtype=torch.float16)},
    )


def test_feature_matrix_has_the_order_of_names() -> None:
    assert feature_matrix(("joint", "entropy", "depth"), layer()).tolist() == [
        [0.25, 1.5, 3.0],
        [0.0, 2.0, 3.0],
    ]
    matrix = feature_matrix(("depth", "joint"), layer(torch.tensor([1.0, 4.0])))
    assert matrix.tolist() == [[1.0, 0.25], [4.0, 0.0]]


def test_feature_log_of_probability_zero_is_finite() -> None:
    matrix = feature_matrix(("log_joint",), layer())
    assert matrix.flatten().tolist() == pytest.approx([math.log(0.25), math.log(MIN_PROB)])


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        (("joint", "entropy", "depth"), set()),
        (("log_joint", "prob"), set()),
        (("margin", "depth"), {"margin"}),
        (("entropy_top500", "rank"), {"entropy_top500", "rank"}),
    ],
)
def test_feature_spec_needs_the_measured_features(names: tuple[str, ...], needs: set) -> None:
    assert FeatureSpec(names=names).needs == needs


def test_feature_spec_reads_back_from_its_card() -> None:
    spec = FeatureSpec(names=("margin", "depth"))
    assert FeatureSpec.from_card(spec.to_card(), source="test") == spec


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("joint", "'features' must be an object, got 'joint'"),
        ({"names": ["joint"]}, "the file was written by another version"),
        ({**CONVENTIONS.to_card(), "unit": "nat"}, "the file was written by another version"),
        ({**CONVENTIONS.to_card(), "names": "joint"}, "the file was written by another version"),
        ({**CONVENTIONS.to_card(), "names": []}, "names no features"),
        ({**CONVENTIONS.to_card(), "names": ["joint", "luck"]}, "unknown features luck"),
        ({**CONVENTIONS.to_card(), "names": [["joint"]]}, "unknown features ['joint']"),
        ({**CONVENTIONS.to_card(), "entropy_unit": "bit"}, "entropy_unit 'bit' (here: 'nat')"),
        ({**CONVENTIONS.to_card(), "temperature": 0.7}, "temperature 0.7 (here: 1.0)"),
        ({**CONVENTIONS.to_card(), "depth_of_first_token": 0}, "depth_of_first_token 0 (here: 1)"),
        ({**CONVENTIONS.to_card(), "distribution": "target"}, "distribution 'target'"),
    ],
)
def test_feature_spec_that_cannot_be_computed_is_refused(card: object, said: str) -> None:
    with refused("the file", said):
        FeatureSpec.from_card(card, source="the file")  # type: ignore[arg-type]

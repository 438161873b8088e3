"""The menu: each rule does what its formula says; wrong options are one clear line."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_c2t.classifier.checkpoint import Classifier, save_classifier, shipped
from sglang_c2t.classifier.features import FeatureSpec
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.config import C2TConfig
from sglang_c2t.offline.train import RECIPES
from sglang_c2t.policies import POLICIES, DraftLayer, build_policy, named
from tests import oracles
from tests.refusals import refused

#: Policies with a classifier, which comes with the package.
SHIPPED = ("c2t", "c2t-log", "c2t-plus")


def layer(
    prob: list[float],
    joint: list[float] | None = None,
    entropy: list[float] | None = None,
    *,
    depth: int = 1,
    alive: list[bool] | None = None,
    **measured: list[float],
) -> DraftLayer:
    return DraftLayer(
        depth=depth,
        prob=torch.tensor(prob),
        joint=torch.tensor(prob if joint is None else joint),
        entropy=torch.tensor([1.0] * len(prob) if entropy is None else entropy),
        alive=torch.tensor([True] * len(prob) if alive is None else alive, dtype=torch.bool),
        measured={name: torch.tensor(values) for name, values in measured.items()},
    )


@pytest.fixture
def classifier_of(tmp_path: Path) -> Callable[..., str]:
    """Saves an untrained classifier that reads these features; gives its file."""

    def save(*names: str) -> str:
        torch.manual_seed(0)
        path = tmp_path / "mine.safetensors"
        save_classifier(Classifier(ConfidenceNet(len(names)), FeatureSpec(names=names), {}), path)
        return str(path)

    return save


# -- rules without a classifier -----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "packed", "serves"),
    [
        (C2TConfig(), True, "auto"),
        (C2TConfig(), False, "c2t"),
        # What no planner takes brings the gate.
        *((C2TConfig(**given), True, "c2t") for given in (
            {"beta": 0.4}, {"classifier": "mine.safetensors"}, {"record": "somewhere"},
            {"policy_options": {"layer_limit": 2}}, {"verify": "static"}, {"max_verify_rows": 64},
        )),
        *((C2TConfig(name), packed, name)
          for name in ("auto", "dyjoint") for packed in (True, False)),
    ],
)  # fmt: skip
def test_policy_default_is_auto_for_packed_rows_else_c2t(
    given: Any, packed: bool, serves: str
) -> None:
    assert named(given, packed=packed) == replace(given, policy=serves)
    if packed and given == C2TConfig():
        assert build_policy(given).name == "auto"


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 1}, {"length": 3}, {}])
def test_fixed_keeps_its_length_and_without_one_everything(options: dict) -> None:
    policy = build_policy(C2TConfig(policy="fixed", policy_options=options))
    for depth in (1, 2, 3, 4, 99):
        kept = policy.keep(layer([1e-9, 1.0], entropy=[7.0, 0.0], depth=depth))
        assert kept.tolist() == [depth <= options.get("length", depth)] * 2


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (C2TConfig(policy="dymax"), [True, False, True]),  # own probability >= 0.3
        (C2TConfig(policy="dymax", beta=0.5), [True, False, False]),
        (C2TConfig(policy="dyjoint"), [False, True, True]),  # joint probability >= 0.08
        (C2TConfig(policy="dyjoint", beta=0.2), [False, False, True]),
    ],
)
def test_threshold_policy_reads_its_own_feature_only(config: C2TConfig, kept: list[bool]) -> None:
    """Defaults are the papers'; a token exactly at the threshold stays."""
    tokens = layer([0.9, 0.2, 0.3], [0.07, 0.08, 0.3], [1.0, 0.5, 1.5], depth=2)
    assert build_policy(config).keep(tokens).tolist() == kept


# -- rules with a classifier --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("c2t", "c2t"), ("c2t", "c2t-top1000"), ("c2t-log", "c2t-log"), ("c2t-plus", "c2t-plus")],
)
def test_classifier_policy_keeps_tokens_whose_confidence_reaches_beta(
    classifier_of: Callable[..., str], name: str, recipe: str
) -> None:
    """Confidences one token at a time, by hand; beta is set to that of the middle token."""
    tokens = [(0.99, 0.9, 0.01, 1), (0.5, 0.4, 1.5, 2), (0.3, 0.01, 4.0, 5)]
    values = [
        {"joint": p, "log_joint": math.log(p), "depth": float(d),
         "entropy": h, "entropy_top1000": h / 2, "margin": q * 3}
        for q, p, h, d in tokens
    ]  # fmt: skip
    features = RECIPES[recipe].names
    file = classifier_of(*features)
    net = build_policy(C2TConfig(policy=name, classifier=file)).classifier.net
    logits = [oracles.logit(net.parameters(), [v[f] for f in features]) for v in values]
    confidences = [1 / (1 + math.exp(-logit)) for logit in logits]
    beta = sorted(confidences)[1] - 1e-5
    policy = build_policy(C2TConfig(policy=name, classifier=file, beta=beta))
    for (q, p, h, d), confidence in zip(tokens, confidences, strict=True):
        token = layer([q], [p], [h], depth=d, margin=[q * 3], entropy_top1000=[h / 2])
        assert policy.keep(token).tolist() == [confidence >= beta]


@pytest.mark.parametrize("name", SHIPPED)
def test_classifier_of_other_features_is_refused(
    classifier_of: Callable[..., str], name: str
) -> None:
    file = classifier_of("entropy_top7")
    said = "wants entropy_top7: choose the policy it was trained for"
    with refused(f"policy {name} reads", said):
        build_policy(C2TConfig(policy=name, classifier=file))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_classifier_ranks_a_sure_token_above_an_unlikely_one(name: str) -> None:
    """A sanity floor under the shipped weights, which are what today's recipe trains."""
    assert shipped(name) is not None
    classifier = build_policy(C2TConfig(policy=name)).classifier
    recipe, confidence = RECIPES[name], classifier.confidence
    assert classifier.features.names == recipe.names
    sure = layer([0.99], [0.97], [0.05], margin=[6.0], depth=2)
    unlikely = layer([0.1], [0.02], [4.0], margin=[0.05], depth=5)
    assert confidence(sure).item() > 0.7
    assert confidence(unlikely).item() < 0.4


# -- the menu -----------------------------------------------------------------------------


class Raises:
    """A policy that cannot be made."""

    name = "raises"
    needs: frozenset[str] = frozenset()

    def __init__(self, what: str = "value") -> None:
        raise {"value": ValueError("a\nb"), "exit": SystemExit(1)}[what]

    def keep(self, layer: DraftLayer) -> torch.Tensor:
        return layer.alive


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("nonsense", {}, "unknown c2t policy 'nonsense'; known: auto, c2t, c2t-eagle2, "),
        ("c2t-pls", {}, "did you mean c2t-plus?"),
        ("no.such.module:x", {}, "cannot load c2t policy 'no.such.module:x': ModuleNotFoundError"),
        ("sglang_c2t.policies.fixed:Absent", {}, "cannot load c2t policy"),
        ("json:JSONDecoder", {}, "is no policy: the class has neither keep, which cuts chains, no"),
        ("os:system", {"command": "true"}, "is no class"),
        (f"{__name__}:Raises", {}, "cannot be built: ValueError: a b"),
        (f"{__name__}:Raises", {"what": "exit"}, "cannot be built: SystemExit: 1"),
        (f"{__name__}:Raises", {"wath": 1}, "(['wath']): it takes what; did you mean what?"),
        ("c2t", {"layer_limit": 3}, "does not take these options (['layer_limit']): it takes la"),
        ("fixed", {"lenght": 3}, "it takes length; did you mean length?"),
        ("fixed", {"length": -1}, "policy fixed: length must be a whole number >= 0, got -1"),
    ],
)
def test_policy_or_option_unknown_is_refused_in_one_line(
    policy: str, options: dict[str, Any], said: str
) -> None:
    with refused(said):
        build_policy(C2TConfig(policy=policy, policy_options=options))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (C2TConfig("fixed", beta=0.5), "policy fixed has no threshold: drop --c2t-beta"),
        (C2TConfig("fixed", classifier="mine"), "policy fixed reads no classifier: drop mine"),
        (C2TConfig("dyjoint", classifier="mine"), "policy dyjoint reads no classifier: drop mine"),
        (C2TConfig(classifier="absent.safetensors"), "cannot read its card absent.json"),
    ],
)
def test_policy_setting_that_is_not_read_is_refused_in_one_line(
    config: C2TConfig, said: str
) -> None:
    with refused(said):
        build_policy(config)


@pytest.mark.parametrize("name", ["beta", "policy", "classifier"])
def test_policy_option_that_repeats_a_setting_is_refused(name: str) -> None:
    with refused(f"policy_options: {name} is a setting of its own: give"):
        C2TConfig(policy="dyjoint", policy_options={name: 0.6})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = (\n", "broken.py, line 1)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_policy_module_that_cannot_be_imported_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with refused(said):
        build_policy(C2TConfig(policy="broken:Rule"))


def test_custom_policy_is_loaded_by_module_and_class() -> None:
    policy = build_policy(
        C2TConfig(policy="sglang_c2t.policies.fixed:Fixed", policy_options={"length": 1})
    )
    assert policy == POLICIES["fixed"](length=1)

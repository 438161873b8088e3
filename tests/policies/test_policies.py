"""The menu: each rule does what its formula says; wrong options are one clear line."""

import pytest
import torch

from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.policies import POLICIES, DraftLayer, build_policy


def layer(depth: int, joint: list[float], entropy: list[float]) -> DraftLayer:
    p = torch.tensor(joint)
    return DraftLayer(
        depth=depth,
        prob=p,
        joint=p,
        entropy=torch.tensor(entropy),
        alive=torch.ones(len(joint), dtype=torch.bool),
    )


@pytest.mark.parametrize("length", [0, 1, 3])
def test_fixed_keeps_exactly_its_length(length: int) -> None:
    policy = build_policy(C2TConfig(policy="fixed", policy_options={"length": length}))
    for depth in range(1, 6):
        assert policy.keep(layer(depth, [0.1, 1.0], [3.0, 0.0])).tolist() == [depth <= length] * 2


def test_fixed_without_a_length_keeps_everything() -> None:
    policy = build_policy(C2TConfig(policy="fixed"))
    assert policy.keep(layer(99, [1e-9], [7.0])).tolist() == [True]


def rule_layer() -> DraftLayer:
    """Three tokens whose own probability, joint probability and entropy all differ."""
    return DraftLayer(
        depth=2,
        prob=torch.tensor([0.9, 0.2, 0.3]),
        joint=torch.tensor([0.07, 0.08, 0.3]),
        entropy=torch.tensor([1.0, 0.5, 1.5]),
        alive=torch.ones(3, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (C2TConfig(policy="dymax"), [True, False, True]),  # own probability >= 0.3
        (C2TConfig(policy="dymax", beta=0.5), [True, False, False]),
        (C2TConfig(policy="dyjoint"), [False, True, True]),  # joint probability >= 0.08
        (C2TConfig(policy="dyjoint", beta=0.2), [False, False, True]),
        (C2TConfig(policy="entropy"), [True, True, False]),  # entropy <= 1 nat
        (C2TConfig(policy="entropy", policy_options={"max_entropy": 0.5}), [False, True, False]),
    ],
)
def test_a_threshold_rule_reads_its_own_feature_and_no_other(
    config: C2TConfig, kept: list[bool]
) -> None:
    """Defaults are the papers'; a token exactly at the threshold stays."""
    assert build_policy(config).keep(rule_layer()).tolist() == kept


def test_c2t_keeps_tokens_whose_confidence_reaches_beta() -> None:
    """Keep = sigmoid(w2 relu(W1 x + b1) + b2) >= beta, computed here by hand."""
    policy = build_policy(C2TConfig(policy="c2t", beta=0.6))
    net = policy.classifier.net
    for p, h, d in [(0.99, 0.01, 1), (0.5, 1.5, 2), (0.01, 4.0, 5)]:
        x = torch.tensor([p, h, float(d)])
        hidden = (net.hidden.weight @ x + net.hidden.bias).clamp(min=0)
        confidence = torch.sigmoid(net.out.weight[0] @ hidden + net.out.bias[0]).item()
        assert policy.keep(layer(d, [p], [h])).tolist() == [confidence >= 0.6]


def test_the_default_classifier_trusts_a_sure_token_more_than_an_unlikely_one() -> None:
    """A sanity floor under the shipped weights."""
    confidence = build_policy(C2TConfig()).classifier.confidence
    sure = confidence(torch.tensor([0.99]), torch.tensor([0.05]), 1)
    unlikely = confidence(torch.tensor([0.02]), torch.tensor([4.0]), 5)
    assert sure.item() > 0.7 > 0.3 > unlikely.item()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            C2TConfig(policy="nonsense"),
            "unknown c2t policy 'nonsense'; known: c2t, dyjoint, dymax, entropy, fixed",
        ),
        (C2TConfig(policy="no_such_module:Rule"), "cannot load c2t policy"),
        (C2TConfig(policy="fixed", beta=0.5), "policy fixed does not take these options"),
        (C2TConfig(policy="c2t", policy_options={"depth": 2}), "does not take these options"),
        (C2TConfig(policy="fixed", policy_options={"length": -1}), "whole number >= 0, got -1"),
        (C2TConfig(policy="fixed", policy_options={"length": 1.5}), "whole number >= 0, got 1.5"),
        (C2TConfig(policy="entropy", beta=0.5), "policy entropy does not take these options"),
        (C2TConfig(policy="entropy", policy_options={"max_entropy": -1}), "nats >= 0, got -1"),
        (C2TConfig(classifier="absent.safetensors"), "cannot read its card absent.json"),
    ],
)
def test_a_wrong_policy_is_refused_in_one_line(config: C2TConfig, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_policy(config)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_policy_of_the_users_own_is_loaded_by_module_and_class() -> None:
    policy = build_policy(
        C2TConfig(policy="sglang_c2t.policies.fixed:Fixed", policy_options={"length": 1})
    )
    assert policy == POLICIES["fixed"](C2TConfig(), length=1)

"""A policy that always fails is refused before it serves; each policy runs once first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sglang_c2t.config import C2TConfig
from sglang_c2t.policies import POLICIES, policy_for, tree_policy_names
from sglang_c2t.policies.base import DraftLayer, Growth, TreeLayer, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.trial import try_policy
from tests.refusals import refused

CHAIN = TreeShape(1, 5, 6)
TREE = TreeShape(4, 5, 28)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_policy_trial_accepts_every_chain_policy(name: str, steps: int) -> None:
    assert policy_for(C2TConfig(policy=name), TreeShape(1, steps, steps + 1)).name == name


@pytest.mark.parametrize("name", tree_policy_names())
def test_policy_trial_accepts_every_tree_policy(name: str) -> None:
    assert policy_for(C2TConfig(policy=name), TREE).name == name


@dataclass
class Rule:
    """A chain rule that answers as the test says."""

    answer: Callable[[DraftLayer], Any]
    needs: Any = frozenset()
    name: ClassVar[str] = "rule"

    def keep(self, layer: DraftLayer) -> Tensor:
        return self.answer(layer)


@dataclass
class TreeRule:
    """The same for trees."""

    answer: Callable[[TreeLayer], Any]
    name: ClassVar[str] = "tree-rule"
    needs: ClassVar[frozenset[str]] = frozenset()

    def check(self, shape: TreeShape) -> None:
        """Any shape will do."""

    def grow(self, layer: TreeLayer) -> Growth:
        return self.answer(layer)


def fails(error: BaseException) -> Callable[[object], Any]:
    """An answer that raises."""

    def answer(layer: object) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            Rule(fails(ValueError("two\nlines"))),
            "rule fails on a made-up draft: ValueError: two lin",
        ),
        (Rule(fails(SystemExit(3))), "SystemExit: 3"),
        (Rule(lambda layer: None), "fails on a made-up draft: AttributeError"),
        (Rule(lambda layer: layer.prob), "keep must be bool [2], got torch.float32 [2]"),
        (Rule(lambda layer: layer.alive[:1]), "keep must be bool [2], got torch.bool [1]"),
        (Rule(lambda layer: layer.measured["margin"] > 0), "KeyError: 'margin'"),
        (Rule(lambda layer: layer.parent.alive), "'NoneType' object has no attribute 'alive'"),
        (
            Rule(lambda layer: layer.alive, {"colour"}),
            "needs 'colour', which sglang-c2t does not measure, and has no method measure",
        ),
        (Rule(lambda layer: layer.alive, None), "fails on a made-up draft: TypeError"),
        (object(), "c2t policy object is no policy: it has no name, needs, keep"),
        (
            TreeRule(fails(RuntimeError("no"))),
            "tree-rule fails on a made-up draft: RuntimeError: no",
        ),
        (TreeRule(lambda layer: layer.joint), "AttributeError"),
        (
            TreeRule(lambda layer: Growth(layer.joint[:1], layer.joint)),
            "key must be float32 [2, 1, 4]",
        ),
        (TreeRule(lambda layer: Growth(layer.joint, layer.joint > 0)), "expand must be float32"),
        (TreeRule(lambda layer: Growth(*[layer.joint] * 3)), "verify must be bool"),
        (
            TreeRule(lambda layer: EAGLE2().grow(layer) if layer.depth == 1 else 1 / 0),
            "ZeroDivisionError",
        ),
    ],
)
def test_policy_trial_refuses_a_failing_policy_in_one_line(policy: Any, said: str) -> None:
    with refused(said):
        try_policy(policy, TREE if isinstance(policy, TreeRule) else CHAIN)


def test_policy_trial_skips_a_policy_with_its_own_measurements() -> None:
    """It may read hidden states, whose width is the draft model's."""
    rule = Rule(fails(RuntimeError("asked")), needs={"hidden"})
    rule.measure = lambda logits, hidden: {"hidden": hidden}  # type: ignore[attr-defined]
    try_policy(rule, CHAIN)


def test_policy_trial_shows_layers_as_they_are_served() -> None:
    seen: list[DraftLayer] = []

    def remember(layer: DraftLayer) -> Tensor:
        seen.append(layer)
        return layer.alive

    try_policy(Rule(remember, needs={"margin", "entropy_top5"}), CHAIN)
    first, second = seen
    assert (first.depth, second.depth) == (1, 2)
    assert first.parent is None
    assert second.parent is not None
    assert set(first.measured) == {"prob", "entropy", "margin", "entropy_top5"}
    torch.testing.assert_close(second.joint, second.prob * second.parent.joint)

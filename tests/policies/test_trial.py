"""What always fails is refused before it serves; what serves has been asked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.policies import POLICIES, build_policy, policy_for, tree_policy_names
from sglang_c2t.policies.base import DraftLayer, Growth, TreeLayer, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.trial import try_policy

CHAIN = TreeShape(1, 5, 6)
TREE = TreeShape(4, 5, 28)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"mcsd-hidden"}))
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_chain_policy_of_the_menu_passes(name: str, steps: int) -> None:
    assert policy_for(C2TConfig(policy=name), TreeShape(1, steps, steps + 1)).name == name


@pytest.mark.parametrize("name", tree_policy_names())
def test_every_tree_policy_of_the_menu_passes(name: str) -> None:
    assert policy_for(C2TConfig(policy=name), TREE).name == name


@dataclass
class Rule:
    """A chain rule that answers with what it was given, or raises it."""

    answer: Any
    needs: Any = frozenset()
    name: ClassVar[str] = "rule"

    def keep(self, layer: DraftLayer) -> Tensor:
        if isinstance(self.answer, BaseException):
            raise self.answer
        kept: Tensor = self.answer(layer)
        return kept


@dataclass
class TreeRule:
    """The same for trees."""

    answer: Any
    name: ClassVar[str] = "tree-rule"
    needs: ClassVar[frozenset[str]] = frozenset()

    def check(self, shape: TreeShape) -> None:
        """Any shape will do."""

    def grow(self, layer: TreeLayer) -> Growth:
        if isinstance(self.answer, BaseException):
            raise self.answer
        grown: Growth = self.answer(layer)
        return grown


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ValueError("two\nlines"), "policy rule fails on a made-up draft: ValueError: two lines"),
        (SystemExit(3), "SystemExit: 3"),
        (lambda layer: None, "fails on a made-up draft: AttributeError"),
        (lambda layer: layer.prob, r"keep must be bool [2], got torch.float32 [2]"),
        (lambda layer: layer.alive[:1], "keep must be bool [2], got torch.bool [1]"),
        (lambda layer: layer.measured["margin"] > 0, "KeyError: 'margin'"),
        (lambda layer: layer.parent.alive, "'NoneType' object has no attribute 'alive'"),
    ],
)
def test_a_chain_rule_that_always_fails_is_refused_in_one_line(answer: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        try_policy(Rule(answer), CHAIN)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RuntimeError("no"), "policy tree-rule fails on a made-up draft: RuntimeError: no"),
        (lambda layer: layer.joint, "AttributeError"),
        (lambda layer: Growth(layer.joint[:1], layer.joint), "key must be float32 [2, 1, 4], got"),
        (lambda layer: Growth(layer.joint, layer.joint > 0), "expand must be float32"),
        (lambda layer: Growth(layer.joint, layer.joint, layer.joint), "verify must be bool"),
        (lambda layer: EAGLE2().grow(layer) if layer.depth == 1 else 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_tree_rule_that_always_fails_is_refused_in_one_line(answer: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        try_policy(TreeRule(answer), TREE)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Rule(lambda layer: layer.alive, needs={"colour"}), "needs 'colour', which nobody measur"),
        (Rule(lambda layer: layer.alive, needs=None), "fails on a made-up draft: TypeError"),
        (object(), "c2t policy object is no policy: it has no name, needs, keep"),
    ],
)
def test_what_lacks_parts_of_a_policy_is_refused(policy: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        try_policy(policy, CHAIN)
    assert said in str(error.value)


def test_a_rule_that_reads_hidden_states_is_not_asked() -> None:
    """Their width is the draft model's, and nobody knows it here."""
    try_policy(Rule(RuntimeError("asked"), needs={"hidden"}), CHAIN)


def test_a_rule_is_asked_for_layers_as_they_are_served() -> None:
    seen: list[DraftLayer] = []

    def remember(layer: DraftLayer) -> Tensor:
        seen.append(layer)
        return layer.alive

    try_policy(Rule(remember, needs={"margin", "topk_prob", "entropy_top5"}), CHAIN)
    first, second = seen
    assert (first.depth, second.depth) == (1, 2)
    assert first.parent is None
    assert second.parent is not None
    assert set(first.measured) == {"prob", "entropy", "margin", "topk_prob", "entropy_top5"}
    torch.testing.assert_close(second.joint, second.prob * second.parent.joint)


# -- classes of the user's own ----------------------------------------------------------------


class Raises:
    """A policy that cannot be made."""

    name = "raises"
    needs: frozenset[str] = frozenset()

    def __init__(self, what: str = "value") -> None:
        raise {"value": ValueError("a\nb"), "exit": SystemExit(1)}[what]

    def keep(self, layer: DraftLayer) -> Tensor:
        return layer.alive


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("json:JSONDecoder", {}, "is no policy: the class has neither keep, which cuts chains, no"),
        ("sys:exit", {}, "is no class, but <built-in function exit>"),
        ("os:system", {"command": "true"}, "is no class"),
        (":x", {}, "cannot load c2t policy ':x': ValueError: Empty module name"),
        ("no.such.module:x", {}, "cannot load c2t policy 'no.such.module:x': ModuleNotFoundError"),
        (f"{__name__}:Raises", {}, "cannot be built: ValueError: a b"),
        (f"{__name__}:Raises", {"what": "exit"}, "cannot be built: SystemExit: 1"),
        (f"{__name__}:Raises", {"wath": 1}, "(['wath']): it takes what; did you mean what?"),
        ("c2t", {"layer_limit": 3}, "does not take these options (['layer_limit']): it takes la"),
        ("fixed", {"lenght": 3}, "it takes length; did you mean length?"),
        ("c2t-pls", {}, "did you mean c2t-plus?"),
    ],
)
def test_a_policy_that_is_none_is_refused_in_one_line(
    policy: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_policy(C2TConfig(policy=policy, policy_options=options))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = (\n", "'(' was never closed (broken.py, line 1)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as error:
        build_policy(C2TConfig(policy="broken:Rule"))
    assert said in str(error.value).replace(f"{tmp_path}/", "")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("mcsd", {"per_request": 1}, "policy mcsd: per_request must be true or false, got 1"),
        ("fixed", {"length": True}, "policy fixed: length must be a whole number >= 0, got True"),
        ("fixed", {"length": 10**400}, "length must be a whole number >= 0, got 1000"),
        ("entropy", {"max_entropy": float("nan")}, "max_entropy must be a number of nats >= 0"),
        ("entropy", {"max_entropy": "1"}, "max_entropy must be a number of nats >= 0, got '1'"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_when_the_policy_is_built(
    policy: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_policy(C2TConfig(policy=policy, policy_options=options))
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["beta", "policy", "classifier"])
def test_an_option_that_repeats_a_setting_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"policy_options: {name} is a setting of its own: give"):
        C2TConfig(policy="dyjoint", policy_options={name: 0.6})

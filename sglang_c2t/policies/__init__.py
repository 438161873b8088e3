"""The policy menu: one file per rule, one entry here, built from a :class:`C2TConfig`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from dataclasses import is_dataclass, replace
from typing import Any

from sglang_c2t.checks import format_error, shown
from sglang_c2t.classifier.checkpoint import Classifier, load_classifier, shipped
from sglang_c2t.config import DEFAULT, C2TConfig, ConfigError
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.hints import did_you_mean
from sglang_c2t.policies.auto import Auto, RowsOnly, plans
from sglang_c2t.policies.base import ChainPolicy, Gate, TreePolicy, TreeShape, is_tree_policy
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_log import C2TLog
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree, PlannedTree
from sglang_c2t.policies.trial import try_policy

# Re-exported.
__all__ = ["ChainPolicy", "DraftLayer", "TreePolicy", "plans"]


#: Policies for chains without a classifier.
PLAIN: tuple[Any, ...] = (DyJoint, DyMax, Fixed, RowsOnly)

#: Policies with a classifier, in the order in which :func:`policy_of` tries them.
TRAINED: tuple[Any, ...] = (C2T, C2TLog, C2TPlus, Auto)

#: Rules for chains, by their ``--c2t-policy`` name.
POLICIES: dict[str, Any] = {cls.name: cls for cls in (*PLAIN, *TRAINED)}

#: Rules for trees only; the gates of :data:`POLICIES` prune trees as well.
TREE_POLICIES: dict[str, Any] = {EAGLE2.name: EAGLE2}

#: Suffix of a gate's name: EAGLE-2 grows the tree, the gate prunes it afterwards.
ON_EAGLE2 = "-eagle2"

#: Suffix of a policy's name: its shipped classifier for trees.
ON_TREES = "-tree"


def policy_of(classifier: Classifier) -> str:
    """Name of the policy that serves this classifier."""
    for cls in TRAINED:
        if set(classifier.features.names) <= cls.reads:
            return str(cls.name)
    raise ConfigError(
        f"no policy serves a classifier that reads {', '.join(classifier.features.names)}"
    )


def named(config: C2TConfig, *, packed: bool) -> C2TConfig:
    """Fill in the default policy's name. It is the planner if drafts are verified ``packed``. It is
    the published gate otherwise, and if the user sets an option that only gates take or records
    what a gate would cut.
    """
    if config.policy != DEFAULT:
        return config
    wants_gate = (
        config.beta is not None
        or config.classifier != "default"
        or bool(config.policy_options)
        or config.record is not None
        or config.max_verify_rows is not None
    )
    planned = packed and config.verify != "static" and not wants_gate
    return replace(config, policy=Auto.name if planned else C2T.name)


def build_policy(config: C2TConfig) -> ChainPolicy:
    """Build the configured policy for chains. Raises :class:`ConfigError` for an unknown name, an
    unknown option or an unusable classifier.
    """
    config = named(config, packed=True)
    policy = _built(config, config.policy.removesuffix(ON_EAGLE2), _options(config))
    if is_tree_policy(policy) or _only_trees(config.policy):
        raise ConfigError(
            f"policy {config.policy} grows trees: set --speculative-eagle-topk above 1, or choose "
            f"one of {', '.join(sorted(POLICIES))}"
        )
    return policy


def build_tree_policy(config: C2TConfig) -> TreePolicy:
    """Build the configured policy for trees; a gate becomes Algorithm 1 with that gate.
    ``policy_options`` of a gate may hold ``layer_limit``. Raises :class:`ConfigError` as
    :func:`build_policy` does, and for a rule that cuts chains only.
    """
    config = named(config, packed=True)
    options, name = _options(config), config.policy
    if name.endswith(ON_EAGLE2):
        return GatedEAGLE2(_gate(config, name.removesuffix(ON_EAGLE2), options))
    if name in TREE_POLICIES or (":" in name and is_tree_policy(_own_class(name))):
        return _built(config, name, options)
    if name == Auto.name:
        return PlannedTree(_built(_on_trees(config, Auto.shipped_as), name, options))
    limit = {"layer_limit": options.pop("layer_limit")} if "layer_limit" in options else {}
    return GatedTree(_gate(config, name, options), **limit)


def policy_for(config: C2TConfig, shape: TreeShape, pair: str | None = None) -> Any:
    """Build the configured policy for this shape of drafts, and try it once. ``topk`` 1 means
    chains. The default classifier is the one in the folder ``pair``, if it exists. Raises
    :class:`ConfigError` if the policy cannot be built or fails the trial.
    """
    policy: Any
    if pair is not None and config.classifier == "default":
        config = _of_pair(config, pair, trees=shape.topk > 1)
    if shape.topk == 1:
        policy = build_policy(config)
    else:
        policy = build_tree_policy(config)
        policy.check(shape)
    try_policy(policy, shape)
    return policy


def _of_pair(config: C2TConfig, pair: str, *, trees: bool) -> C2TConfig:
    """Set the classifier that is shipped for a pair, if there is one for this policy."""
    policy = config.policy.removesuffix(ON_EAGLE2)
    name = getattr(POLICIES.get(policy), "shipped_as", policy)
    name = f"{pair}/{name + ON_TREES if trees and shipped(name + ON_TREES) else name}"
    return config if shipped(name) is None else replace(config, classifier=name)


def _gate(config: C2TConfig, name: str, options: dict[str, Any]) -> Gate:
    """Build a gate for trees, with a classifier trained on trees and a threshold for them."""
    if name in TREE_POLICIES or name == Auto.name:
        raise ConfigError(f"policy {config.policy}: {name} is no gate that could prune a tree")
    gate = _built(_on_trees(config, name), name, options)
    if not isinstance(gate, Gate) or plans(gate):
        raise ConfigError(
            f"policy {config.policy} cuts chains only: set --speculative-eagle-topk 1, or choose "
            f"one of {', '.join(tree_policy_names())}"
        )
    beta = getattr(gate, "tree_beta", gate.beta) if config.beta is None else config.beta
    return replace(gate, beta=beta) if is_dataclass(gate) else gate


def _on_trees(config: C2TConfig, name: str) -> C2TConfig:
    """Set the classifier that is shipped for trees under this policy's name, if there is one."""
    if config.classifier != "default" or shipped(name + ON_TREES) is None:
        return config
    return replace(config, classifier=name + ON_TREES)


def check_policy(config: C2TConfig) -> None:
    """Raise :class:`ConfigError` if the policy supports neither chains nor trees."""
    try:
        build_policy(config)
    except ConfigError as no_chains:
        try:
            build_tree_policy(config)
        except ConfigError as no_trees:
            for_trees = _only_trees(config.policy) or "layer_limit" in config.policy_options
            raise (no_trees if for_trees else no_chains) from None


def policy_names() -> list[str]:
    """Return all names on the menu."""
    return sorted({*POLICIES, *tree_policy_names()})


def tree_policy_names() -> list[str]:
    """Return all names that support trees."""
    gates = [
        cls.name for cls in (*TRAINED, *PLAIN) if hasattr(cls, "confidence") and not plans(cls)
    ]
    return sorted([*TREE_POLICIES, Auto.name, *gates, *(gate + ON_EAGLE2 for gate in gates)])


def _options(config: C2TConfig) -> dict[str, Any]:
    options = dict(config.policy_options)
    if config.beta is not None:
        options["beta"] = config.beta
    return options


def _only_trees(name: str) -> bool:
    return name in TREE_POLICIES or name.endswith(ON_EAGLE2)


def _built(config: C2TConfig, name: str, options: dict[str, Any]) -> Any:
    """Build the policy of this name; any error becomes a one-line :class:`ConfigError`."""
    learns = POLICIES.get(name) in TRAINED
    cls = (POLICIES | TREE_POLICIES).get(name) or _own_class(name)
    if not learns and config.classifier != "default":
        raise ConfigError(
            f"policy {config.policy} reads no classifier: drop {config.classifier}, or "
            "choose a policy that learnt one"
        )
    given = {"classifier": _classifier(cls, config)} if learns else {}
    _refuse_options(cls, config, options)
    try:
        return cls(**given, **options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"policy {config.policy} cannot be built: {format_error(error)}"
        ) from error


def _classifier(cls: Any, config: C2TConfig) -> Classifier:
    """Load the policy's classifier; ``default`` is the one shipped under the policy's name."""
    own = getattr(cls, "shipped_as", cls.name)
    name = own if config.classifier == "default" else config.classifier
    classifier = load_classifier(name)
    if strange := set(classifier.features.names) - cls.reads:
        raise ConfigError(
            f"policy {cls.name} reads {', '.join(sorted(cls.reads))}, but classifier "
            f"{config.classifier} wants {', '.join(sorted(strange))}: choose the policy it "
            "was trained for"
        )
    return classifier


def _refuse_options(cls: Any, config: C2TConfig, options: Collection[str]) -> None:
    """Raise :class:`ConfigError` for options that the policy's constructor does not take."""
    parameters = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    strange = sorted(name for name in options if name not in parameters)
    if "beta" in strange:
        raise ConfigError(f"policy {config.policy} has no threshold: drop --c2t-beta (beta)")
    if not strange:
        return
    takes = [name for name in parameters if name not in {"beta", "classifier"}]
    if hasattr(cls, "confidence") and not plans(cls):
        takes.append("layer_limit (in trees)")
    raise ConfigError(
        f"policy {config.policy} does not take these options ({shown(strange)}): it takes "
        f"{', '.join(takes) or 'none'}{did_you_mean(strange[0], takes)}"
    )


def _own_class(name: str) -> Any:
    """Import the class named by ``module:Class``."""
    if ":" not in name:
        raise ConfigError(
            f"unknown c2t policy {shown(name)}; known: {', '.join(policy_names())}, or "
            f"module:Class of your own{did_you_mean(name, policy_names())}"
        )
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ConfigError(f"cannot load c2t policy {shown(name)}: {error.msg} ({where})") from error
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ConfigError(f"cannot load c2t policy {shown(name)}: {format_error(error)}") from error
    if not isinstance(found, type):
        raise ConfigError(f"c2t policy {shown(name)} is no class, but {shown(found)}")
    if not (hasattr(found, "keep") or hasattr(found, "grow")):
        raise ConfigError(
            f"c2t policy {shown(name)} is no policy: the class has neither keep, which cuts "
            "chains, nor grow, which shapes trees"
        )
    return found

"""The policy menu: one file per rule, one entry here, built from a :class:`C2TConfig`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sglang_c2t.classifier.checkpoint import Classifier, load_classifier, shipped
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_log import C2TLog
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.entropy import Entropy
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.logistic import Logistic
from sglang_c2t.policies.mcsd import MCSD, MCSDHidden

__all__ = ["POLICIES", "ChainPolicy", "DraftLayer", "build_policy", "policy_of"]


def _plain(cls: Callable[..., ChainPolicy]) -> Callable[..., ChainPolicy]:
    """A policy that needs nothing but its own options."""
    return lambda config, **options: cls(**options)


def _trained(cls: Any) -> Callable[..., ChainPolicy]:
    """A policy with a classifier; ``default`` is the one shipped under the policy's name."""

    def build(config: C2TConfig, **options: Any) -> ChainPolicy:
        name = cls.name if config.classifier == "default" else config.classifier
        if config.classifier == "default" and shipped(name) is None:
            raise ConfigError(
                f"policy {name} has no shipped classifier, because it fits one draft model only: "
                "train one and give it with --c2t-classifier"
            )
        classifier = load_classifier(name)
        if strange := set(classifier.features.names) - cls.reads:
            raise ConfigError(
                f"policy {cls.name} reads {', '.join(sorted(cls.reads))}, but classifier "
                f"{config.classifier} wants {', '.join(sorted(strange))}: choose the policy it "
                "was trained for"
            )
        if classifier.label != cls.label:
            raise ConfigError(
                f"policy {cls.name} wants a confidence that a token {cls.label}, but classifier "
                f"{config.classifier} was trained to say that it {classifier.label}"
            )
        return cls(classifier=classifier, **options)

    return build


#: Policies with a classifier, in the order in which :func:`policy_of` looks.
TRAINED: tuple[Any, ...] = (C2T, C2TLog, C2TPlus, Logistic, MCSD, MCSDHidden)

#: Name after ``--c2t-policy`` -> how to build it from the configuration and its options.
POLICIES: dict[str, Callable[..., ChainPolicy]] = {
    "dyjoint": _plain(DyJoint),
    "dymax": _plain(DyMax),
    "entropy": _plain(Entropy),
    "fixed": _plain(Fixed),
    **{cls.name: _trained(cls) for cls in TRAINED},
}


def policy_of(classifier: Classifier) -> str:
    """Name of the policy that serves this classifier."""
    for cls in TRAINED:
        if set(classifier.features.names) <= cls.reads and classifier.label == cls.label:
            return str(cls.name)
    raise ConfigError(
        f"no policy serves a classifier that reads {', '.join(classifier.features.names)} and "
        f"says that a token {classifier.label}"
    )


def build_policy(config: C2TConfig) -> ChainPolicy:
    """Build the configured policy.

    Raises :class:`ConfigError` for an unknown name, an option the policy does not take,
    or a classifier that cannot be used.
    """
    options = dict(config.policy_options)
    if config.beta is not None:
        options["beta"] = config.beta
    try:
        return _factory(config.policy)(config, **options)
    except TypeError as error:
        # The only TypeError a policy's constructor raises is about its arguments.
        raise ConfigError(
            f"policy {config.policy} does not take these options ({sorted(options)}): {error}"
        ) from error


def _factory(name: str) -> Callable[..., ChainPolicy]:
    """The menu's entry, or the class behind ``module:Class`` for a policy of the user's."""
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        raise ConfigError(
            f"unknown c2t policy {name!r}; known: {', '.join(sorted(POLICIES))}, "
            "or module:Class of your own"
        )
    module_name, _, attribute = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load c2t policy {name!r}: {error}") from error
    return _plain(cls)

"""Start-up log lines: how the server verifies, and which classifier judges its drafts."""

from __future__ import annotations

import logging
from typing import Any

from sglang_c2t.classifier.pair import Pair
from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.served import classifier_facts

logger = logging.getLogger(__name__)


def log_start(config: C2TConfig, verification: str, policy: Any, pair: Pair | None) -> None:
    """Log the policy, how its drafts are verified, all settings, and the classifier."""
    name, settings = config.policy, config.to_json()
    logger.info("C2T: policy %s, %s, settings %s", name, verification, settings)
    log_classifier(config, policy, pair)


def log_prefill_only() -> None:
    """Log that another server verifies the drafts of this one."""
    logger.info("C2T: no gate here: another server verifies the drafts of this one")


def log_classifier(config: C2TConfig, policy: Any, pair: Pair | None) -> None:
    """Log the policy's classifier and the reason for it, if the policy has one. It warns if the
    classifier was trained on another pair of models than the served ``pair``.
    """
    facts = classifier_facts(policy, pair)
    if facts is None:
        return
    given = config.classifier != "default"
    why = "as given" if given else "the default"
    if not given and facts["learnt_from"] != "this pair":
        why = "none is shipped for this pair"
        why += f" {tuple(pair)}" if pair else ", whose weights are not to be found"
    level = logging.WARNING if facts["learnt_from"] == "another pair" else logging.INFO
    logger.log(
        level,
        "C2T: classifier %s learnt from %s (%s): %s",
        facts["name"], facts["learnt_from"], ", ".join(facts["origins"]), why,
    )  # fmt: skip

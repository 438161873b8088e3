"""The default thresholds of ``c2t-log`` and ``c2t-plus``, and how they are chosen.

Rule: the threshold at which the rule accepts as much as ``c2t`` does at its published 0.5, so that
who switches over verifies fewer drafts for the same tokens per verification. Drafts of five tokens,
shipped classifiers (the real pair's own, where there are any), rounded to two digits.
"""

from __future__ import annotations

import numpy as np

from eval.tables.markdown import section
from sglang_c2t.classifier.checkpoint import SHIPPED, Classifier, load_classifier
from sglang_c2t.offline.curves import ODDS_GRID, Curve
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_log import C2TLog
from sglang_c2t.policies.c2t_plus import C2TPlus

#: As the README serves: ``--speculative-num-steps``.
NUM_STEPS = 5
CHOSEN: tuple[type[C2T], ...] = (C2TLog, C2TPlus)


def shipped(kind: type[C2T]) -> Classifier:
    """Classifiers that the package ships for the real pair, or for every pair."""
    own = f"smollm2/{kind.name}"
    return load_classifier(own if (SHIPPED / f"{own}.safetensors").is_file() else kind.name)


def equal_accept_length(rival: C2T, rule: type[C2T], chains: Chains) -> float:
    """The threshold at which the shipped ``rule`` accepts as much as ``rival``, to two digits."""
    tau = replay(rival, chains, max_length=NUM_STEPS).accept_length()
    classifier = shipped(rule)
    policies = [rule(classifier, beta) for beta in ODDS_GRID]
    curve = Curve.of([replay(policy, chains, max_length=NUM_STEPS) for policy in policies])
    return round(curve.threshold_at(tau, ODDS_GRID, np.ones((1, chains.num_requests))), 2)


def table(chains: Chains) -> list[str]:
    """Accept length and nodes of the defaults on ``chains``, and the thresholds chosen there."""
    published = C2T(shipped(C2T))
    rows = []
    kinds: tuple[type[C2T], ...] = (C2T, *CHOSEN)
    for kind in kinds:
        outcome = replay(kind(shipped(kind)), chains, max_length=NUM_STEPS)
        equal = kind.beta if kind is C2T else equal_accept_length(published, kind, chains)
        cells = [f"{kind.beta:g}", f"{outcome.accept_length():.3f}", f"{outcome.gamma():.3f}"]
        rows.append((f"`{kind.name}`", [*cells, f"{equal:g}"]))
    chosen = ", ".join(f"{kind.beta:g} for `{kind.name}`" for kind in CHOSEN)
    return section(
        "## Default thresholds",
        f"The shipped classifiers, drafts of at most {NUM_STEPS}. A default is the threshold at "
        f"which a rule accepts as much as `c2t` at its published {published.beta:g} on prompts "
        f"that classifiers learn from: {chosen} (`eval/tables/thresholds.py`). On these prompts:",
        ["rule", "threshold", "accept length", "nodes", "threshold that accepts as `c2t`"],
        rows,
    )

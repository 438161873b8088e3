"""The default thresholds of ``c2t-log`` and ``c2t-plus``, and how they are chosen.

Rule: the threshold at which the rule accepts as much as ``c2t`` does at its published 0.5, so that
who switches over verifies fewer drafts for the same tokens per verification. Accept lengths are
those of prompts that classifiers learn from, with the shipped classifiers and drafts of five
tokens; the three draft models count as one traffic, because one default serves all. Rounded to
two digits. What comes of it on prompts that none of them has seen is shown beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.tables.markdown import section
from sglang_c2t.classifier.checkpoint import load_classifier
from sglang_c2t.offline.compare import ODDS_GRID, Array, Curve
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_log import C2TLog
from sglang_c2t.policies.c2t_plus import C2TPlus

#: As the README serves: ``--speculative-num-steps``.
NUM_STEPS = 5
CHOSEN: tuple[type[C2T], ...] = (C2TLog, C2TPlus)


@dataclass(frozen=True)
class Traffic:
    """Recorded chains of several draft models, counted as one."""

    chains: Sequence[Chains]

    def curve(self, policies: Sequence[ChainPolicy]) -> Curve:
        """One point per policy; each request of each draft model is a request."""
        curves = [
            Curve.of([replay(policy, chains, max_length=NUM_STEPS) for policy in policies])
            for chains in self.chains
        ]
        names = ("num_steps", "num_correct", "num_proposed", "num_drafted")
        return Curve(*(np.concatenate([getattr(c, n) for c in curves], axis=1) for n in names))

    @property
    def everyone(self) -> Array:
        """[1, Q] ones."""
        return np.ones((1, sum(chains.num_requests for chains in self.chains)))


def equal_accept_length(rival: ChainPolicy, rule_: type[C2T], traffic: Traffic) -> float:
    """The threshold at which the shipped ``rule_`` accepts as much as ``rival``, to two digits."""
    tau = float(traffic.curve([rival]).tau(traffic.everyone)[0, 0])
    classifier = load_classifier(rule_.name)
    curve = traffic.curve([rule_(classifier, beta) for beta in ODDS_GRID])
    return round(curve.threshold_at(tau, ODDS_GRID, traffic.everyone), 2)


def table(train: Mapping[str, Chains], test: Mapping[str, Chains]) -> list[str]:
    """The thresholds that the rule gives on ``train``, and what they do on ``test``, by draft."""
    published = C2T(load_classifier(C2T.name))
    chosen = {
        kind: equal_accept_length(published, kind, Traffic(list(train.values()))) for kind in CHOSEN
    }
    policies: dict[str, ChainPolicy] = {f"`c2t`, {published.beta:g}": published}
    for kind, beta in chosen.items():
        policies[f"`{kind.name}`, {beta:g}"] = kind(load_classifier(kind.name), beta)
    told = ", ".join(f"{beta:g} for `{kind.name}`" for kind, beta in chosen.items())
    columns = [Traffic(list(train.values())), *(Traffic([chains]) for chains in test.values()),
               Traffic(list(test.values()))]  # fmt: skip
    return section(
        "## Default thresholds",
        "The shipped classifiers, drafts of at most "
        f"{NUM_STEPS} tokens. A default is the threshold at which a rule accepts as much as `c2t` "
        f"at its published {published.beta:g} on the training prompts of all drafts together: "
        f"{told} (`eval/tables/thresholds.py`). On the test prompts, tau / gamma:",
        ["rule", "training prompts, together", *test, "test prompts, together"],
        [(name, [_tau_gamma(policy, on) for on in columns]) for name, policy in policies.items()],
    )


def _tau_gamma(policy: ChainPolicy, traffic: Traffic) -> str:
    curve, everyone = traffic.curve([policy]), traffic.everyone
    return f"{curve.tau(everyone)[0, 0]:.3f} / {curve.gamma(everyone)[0, 0]:.3f}"

"""The tables of ``eval/TABLES.md``: by family first, then over all of them, losses by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from eval.tables.markdown import difference, section, with_interval
from eval.tables.rules import LEARN, OURS, Recorded, Rule, verdict
from sglang_c2t.offline.curves import Array, Curve, everyone
from sglang_c2t.offline.replay import Chains
from sglang_c2t.policies.dyjoint import DyJoint

#: Sizes at whose accept length rules are compared, the first in detail: drafts of fixed chains,
#: nodes of EAGLE-2's trees.
CHAIN_SIZES, TREE_SIZES = (3, 2, 5), (16, 8, 32)
#: As the README serves.
SERVED = 5

#: Survival by position that others published, and where. The EAGLE-3 paper draws its own in a
#: figure, without numbers; vLLM holds three EAGLE-3 heads to theirs (80 prompts of MT-Bench,
#: temperature 0) in tests/v1/spec_decode/test_acceptance_length.py at 029ba375.
PUBLISHED = {
    "Llama-3.1-8B-Instruct, EAGLE-3, MT-Bench (vLLM's tests)": (0.7296, 0.5208, 0.3545),
    "Qwen3-8B, EAGLE-3, MT-Bench (vLLM's tests)": (0.6541, 0.3993, 0.2020),
    "gpt-oss-20b, EAGLE-3, MT-Bench (vLLM's tests)": (0.7165, 0.5120, 0.3337),
    "GLM-5.2, DSpark (vllm-project/vllm#52992)": (0.712, 0.517, 0.390),
}


def conditional(survival: Sequence[float]) -> list[str]:
    """How often a draft is accepted where all before it are, from how often all are."""
    return [
        f"{after / before:.2f}" if before else "-" for before, after in pairwise((1.0, *survival))
    ]


def survival(chains: Chains, requests: Iterable[int]) -> list[float]:
    """How often the k-th draft and all before it are accepted, where a server that drafts whole
    chains comes by.
    """
    accepted = []
    for number in requests:
        at, end = chains.first_root[number : number + 2].tolist()
        while at < end:
            accepted.append(int(chains.num_correct[at]))
            at += accepted[-1] + 1
    drafts = torch.tensor(accepted)
    return [float((drafts >= k).float().mean()) for k in range(1, chains.max_length + 1)]


def acceptance_table(recorded: Recorded) -> list[str]:
    """By position, beside published ones."""
    chains = recorded.replayed
    assert isinstance(chains, Chains)
    served, rows = recorded.sized(SERVED), []
    for family in recorded.families:
        mine = [i for i, group in enumerate(recorded.groups) if group == family]
        members = everyone(recorded.groups, only=family)
        tau = served.tau(recorded.weights * members)[:, 0]
        rows.append((family, [*conditional(survival(chains, mine)), with_interval(tau)]))
    for name, published in PUBLISHED.items():
        short = chains.max_length - len(published)
        rows.append((name, [*conditional(published), *["-"] * short, f"{1 + sum(published):.2f}"]))
    return section(
        "## Acceptance by position",
        "How often a draft is accepted where all before it are, along whole chains. Last: accept "
        f"length of chains of {SERVED}, the target's own token included; of published ones (models "
        "of 8B and more), of the positions shown.",
        ["prompts", *map(str, range(1, chains.max_length + 1)), "accept length"],
        rows,
    )


class Comparison:
    """All tables of chains, or of trees."""

    def __init__(self, recorded: Recorded, rules: Iterable[Rule], sizes: Sequence[int]) -> None:
        self.recorded, self.rules, self.sizes = recorded, list(rules), sizes
        self.kind = "trees" if recorded.trees else "chains"

    def rivals(self) -> list[str]:
        """Rules that ours are compared with."""
        return [*(["eagle2"] if self.recorded.trees else []), DyJoint.name, "logistic"]

    def rival(self, name: str, rule: Rule, size: int) -> Curve | int:
        """The rival of a rule; one that learns did so from the same family."""
        if name == "eagle2":
            return size
        learnt_on = rule.learnt_on if name in LEARN else None
        return next(r.curve for r in self.rules if (r.name, r.learnt_on) == (name, learnt_on))

    def change(self, name: str, rival: str, size: int, families: Sequence[str]) -> Array:
        """[1 + S]: a rule's mean change, over families learnt from and others of ``families``."""
        changes = [
            self.recorded.change(rule.curve, self.rival(rival, rule, size), size, family)
            for rule in self.rules
            if rule.name == name
            for family in rule.tests(self.recorded.families)
            if family in families
        ]
        return np.mean(changes, axis=0)

    def each_table(self) -> list[str]:
        """Every rule on every family that it did not learn from."""
        families, size = self.recorded.families, self.sizes[0]
        rival = self.rivals()[0]

        def cell(rule: Rule, family: str) -> str:
            if family == rule.learnt_on:
                return "-"
            curve = self.rival(rival, rule, size)
            return difference(self.recorded.change(rule.curve, curve, size, family))

        own = [str(size)] * len(families)
        if rival == DyJoint.name:
            joint = self.rules[0].curve
            own = [f"{self.recorded.nodes_at(joint, size, f)[0]:.2f}" for f in families]
        others = [rule for rule in self.rules if rule.name != rival]
        fixed = f"EAGLE-2 with {size} nodes" if self.recorded.trees else f"fixed {size}"
        return section(
            f"### {self.kind}: trained on one family, tested on the others",
            f"Nodes verified at equal accept length (that of {fixed} on the family of the column), "
            f"difference from `{rival}` in per cent. First row: the nodes of `{rival}`.",
            ["rule, trained on", *families],
            [(f"`{rival}`", own), *((_named(r), [cell(r, f) for f in families]) for r in others)],
        )

    def pooled_table(self) -> list[str]:
        """Means over the families learnt from, by family, then over these."""
        families, size = self.recorded.families, self.sizes[0]
        rows = []
        for name in OURS:
            for rival in self.rivals():
                cells = [difference(self.change(name, rival, size, [f])) for f in families]
                cells += [difference(self.change(name, rival, s, families)) for s in self.sizes]
                rows.append((f"`{name}` - `{rival}`", cells))
        sizes = [f"all, {'N =' if self.recorded.trees else 'fixed'} {s}" for s in self.sizes]
        return section(
            f"### {self.kind}: nodes at equal accept length, over the families trained on",
            "Means of the differences in per cent, of the table above and of other rivals; then "
            "the mean over the families, at the accept length of "
            f"{', '.join(map(str, self.sizes))}.",
            ["ours - rival", *families, *sizes],
            rows,
        )

    def losses(self) -> list[str]:
        """Rules that verify more or fewer than a rival, beyond the interval, by name."""
        families, size, lines = self.recorded.families, self.sizes[0], []
        for name in OURS:
            against = []
            for rival in self.rivals():
                where: dict[str, list[str]] = {"fewer": [], "more": [], "no difference": []}
                for family in families:
                    where[verdict(self.change(name, rival, size, [family]))].append(family)
                phrases = {w: f"{w} on {', '.join(named)}" for w, named in where.items() if named}
                if "more" in phrases:
                    phrases["more"] = f"**{phrases['more']}**"
                against.append(f"against `{rival}` {', '.join(phrases.values())}")
            lines.append(f"- {self.kind}, `{name}`: {'; '.join(against)}.")
        return lines


def _named(rule: Rule) -> str:
    return f"`{rule.name}`" + (f", {rule.learnt_on}" if rule.learnt_on else "")

"""``python -m eval.tables``: every stopping rule on the same drafts, at equal accept length.

For each demo draft: record full chains behind every token of every answer, train each
classifier on the training prompts, replay each rule on the test prompts. Exact replay, no
timing: what is counted does not depend on the machine. Writes ``eval/TABLES.md``, and
``eval/VARIANTS.md``: other inputs and sizes of the classifier, and training elsewhere.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from eval.recordings import MAX_NEW_TOKENS, NUM_STEPS, other_prompts, prompts, record
from eval.tables import thresholds
from eval.tables.markdown import bold, bracket, difference, mix, section, tau_gamma
from sglang_c2t.classifier.checkpoint import Classifier, load_classifier
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.offline.compare import (
    ENTROPY_GRID,
    ODDS_GRID,
    Array,
    Curve,
    everyone,
    resamples,
    sweep,
)
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.offline.scores import auc, expected_calibration_error
from sglang_c2t.offline.train import (
    FINE_TUNE_SHARE,
    RECIPES,
    Recipe,
    share_of_prompts,
    train_classifier,
)
from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_log import C2TLog
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.entropy import Entropy
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.logistic import Logistic
from sglang_c2t.policies.mcsd import MCSD

NUM_RESAMPLES = 1000
SHARE_OF_MAX = 0.98

#: Where rules are compared: the accept length of these fixed lengths, and close to the end.
TARGETS: tuple[int | str, ...] = (2, 3, 5, "98 % of max")


class Remembering(Classifier):
    """Computes a layer's confidence once while the same tokens come again, as they do in sweeps
    that only move the threshold.
    """

    def __init__(self, classifier: Classifier) -> None:
        super().__init__(**{f.name: getattr(classifier, f.name) for f in fields(classifier)})
        object.__setattr__(self, "seen", {})

    def confidence(self, layer: DraftLayer) -> torch.Tensor:
        """[B] float32."""
        # Of each depth the tokens' joint probabilities and their confidence.
        seen: dict[Any, tuple[torch.Tensor, torch.Tensor]] = self.seen  # type: ignore[attr-defined]
        if layer.depth not in seen or not torch.equal(seen[layer.depth][0], layer.joint):
            seen[layer.depth] = layer.joint, super().confidence(layer)
        return seen[layer.depth][1]


@dataclass(frozen=True)
class Measured:
    """One draft model: what to learn from, what to measure on with its resamples, and the accept
    lengths to compare at.
    """

    algorithm: str
    train: Recording
    test: Recording
    chains: Chains
    groups: list[str]  # family of each request
    once: Array  # [1, Q]
    drawn: Array  # [S, Q]
    _fixed: dict[int, Curve] = field(default_factory=dict, repr=False)
    _known: dict[Any, tuple[Curve, Array, Array]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, algorithm: str, train: Recording, test: Recording) -> Measured:
        """Resample the requests within their families."""
        chains = Chains.from_recording(test)
        groups = [rid.rsplit("/", 1)[0] for rid in chains.requests]
        drawn = resamples(groups, NUM_RESAMPLES)
        return cls(algorithm, train, test, chains, groups, everyone(groups), drawn)

    @property
    def families(self) -> list[str]:
        """Each family once."""
        return sorted(set(self.groups))

    @cached_property
    def dyjoint(self) -> Curve:
        """The rival of every other table."""
        return sweep(DyJoint, self.chains)

    def fixed(self, length: int) -> Curve:
        """A server that drafts ``length`` tokens."""
        if length not in self._fixed:
            outcome = replay(Fixed(), self.chains, max_length=length)
            self._fixed[length] = Curve.of([outcome])
        return self._fixed[length]

    def target(self, name: int | str, weights: Array) -> Array:
        """[S] accept length to compare at: one that every rule reaches, as whole drafts do."""
        whole = self.fixed(self.chains.max_length).tau(weights)[:, 0]
        if isinstance(name, int):
            return np.minimum(self.fixed(name).tau(weights)[:, 0], whole)
        return SHARE_OF_MAX * whole

    def num_lowered(self, name: int | str, families: Sequence[str | None]) -> int:
        """Resamples in which whole drafts accept less than this fixed length, in some family."""
        lowered = np.zeros(len(self.drawn), dtype=bool)
        for family in families:
            weights = self.drawn * everyone(self.groups, only=family)
            wanted = self.fixed(name).tau(weights) if isinstance(name, int) else 0.0
            lowered |= (self.target(name, weights)[:, None] < wanted).any(axis=1)
        return int(lowered.sum())

    def gammas(self, curve: Curve, weights: Array | None = None) -> list[float]:
        """Gamma at each target."""
        weights = self.once if weights is None else weights
        return [float(curve.gamma_at(self.target(t, weights), weights)[0]) for t in TARGETS]

    def difference(
        self, curve: Curve, rival: Curve, target: int | str, family: str | None = None
    ) -> tuple[Array, Array]:
        """[1] and [S]: relative difference of gamma in per cent, of one family if it is named.

        Paired: both curves are read in the same resample, at the accept length of that resample.
        """
        mine, other = (self._gammas(c, target, family) for c in (curve, rival))
        once, drawn = (100 * (a / b - 1) for a, b in zip(mine, other, strict=True))
        return once, drawn

    def _gammas(self, curve: Curve, target: int | str, family: str | None) -> tuple[Array, Array]:
        """[1] and [S]: gamma of the family at its own accept length; kept, as tables share them."""
        key = id(curve), target, family
        if key not in self._known:
            members = everyone(self.groups, only=family)
            drawn = (self.once * members, self.drawn * members)
            once, many = (curve.gamma_at(self.target(target, w), w) for w in drawn)
            self._known[key] = curve, once, many  # the curve, so that its id stays its own
        return self._known[key][1:]

    def mean_difference(self, curve: Curve, rival: Curve, target: int | str) -> tuple[Array, Array]:
        """[1] and [S]: the mean of :meth:`difference` over families.

        Each family is compared at its own accept length, so with a threshold of its own.
        """
        families = self.families
        found = [self.difference(curve, rival, target, family) for family in families]
        once, drawn = (np.mean(values, axis=0) for values in zip(*found, strict=True))
        return once, drawn


def threshold_rules(classifiers: dict[str, Classifier]) -> dict[str, tuple[Any, Sequence[float]]]:
    """Every rule of the menu that has a threshold: how to build it, and its grid."""
    rules: dict[str, tuple[Any, Sequence[float]]] = {
        "DyMax": (DyMax, ODDS_GRID),
        "DyJoint": (DyJoint, ODDS_GRID),
        "entropy": (Entropy, ENTROPY_GRID),
    }
    for name, classifier in classifiers.items():
        rules[LABELS[name]] = (gate(name, classifier), ODDS_GRID)
    for label, name in SHIPPED.items():
        rules[label] = (gate(name, load_classifier(name)), ODDS_GRID)
    return rules


#: Classifiers of the main table, by recipe.
LABELS = {
    "mcsd": "MCSD, top-k",
    "mcsd-hidden": "MCSD, hidden state",
    "logistic": "logistic, margin",
    "logistic-prob": "logistic, largest q",
    "c2t": "C2T",
    "c2t-log": "C2T-log",
    "c2t-plus": "C2T-plus",
}
OURS = ("C2T", "C2T-log", "C2T-plus")
#: The classifiers that come with the package: from all three drafts together.
SHIPPED = {"C2T, shipped": "c2t", "C2T-plus, shipped": "c2t-plus"}
#: What ours are compared with.
RIVALS = ("DyJoint", "logistic, margin", "logistic, largest q", "MCSD, top-k")
#: Ours and a rival, in the table that goes first.
HEADLINES = (
    ("C2T", "DyJoint"),
    ("C2T-log", "DyJoint"),
    ("C2T-plus", "DyJoint"),
    ("C2T-plus", "logistic, largest q"),
    ("C2T-plus, shipped", "DyJoint"),
)
#: Thresholds of the papers; ours, and the logistic, which has none published.
DEFAULTS = {
    "DyMax": 0.3,
    "DyJoint": 0.08,
    "entropy": 1.0,
    "MCSD, top-k": 0.4,
    "MCSD, hidden state": 0.4,
    "logistic, margin": 0.3,
    "logistic, largest q": 0.3,
    "C2T": 0.85,
    "C2T-log": C2TLog.beta,
    "C2T-plus": C2TPlus.beta,
    "C2T, shipped": C2T.beta,
    "C2T-plus, shipped": C2TPlus.beta,
}


def gate(name: str, classifier: Classifier) -> Callable[[float], ChainPolicy]:
    """The policy of a recipe, open in its threshold."""
    classifier = Remembering(classifier)
    if name.startswith("mcsd"):
        return lambda beta: MCSD(classifier, beta, per_request=True)
    if name.startswith("logistic"):
        return lambda beta: Logistic(classifier, beta)
    return lambda beta: C2T(classifier, beta)


# --- the tables ---------------------------------------------------------------------------------


def main_tables(
    measured: Measured,
    curves: dict[str, Curve],
    rules: dict[str, Any],
    classifiers: dict[str, Classifier],
) -> list[str]:
    """The paper's Table 7 at each rule's own threshold, and all rules at equal accept length."""
    chains = measured.chains
    own = {f"fixed {n}": ("-", measured.fixed(n)) for n in range(2, 10)}
    for name, (make, _) in rules.items():
        default = DEFAULTS[name]
        own[name] = f"{default:g}", Curve.of([replay(make(default), chains)])
    default = DEFAULTS["MCSD, top-k"]
    outcome = replay(MCSD(classifiers["mcsd"], default), chains, batch_size=32)
    own["MCSD, top-k, whole batch of 32"] = f"{default:g}", Curve.of([outcome])
    lines = section(
        f"### {measured.algorithm}: at each rule's own threshold",
        "The form of C2T's Table 7: average drafted length, accept length tau (bonus included), "
        "and gamma, drafts verified per verification. In brackets: 95 % intervals over requests.",
        ["method", "threshold", "drafted", "tau", "gamma"],
        [(name, [told, *_at_own_threshold(measured, c)]) for name, (told, c) in own.items()],
    )
    return lines + _equal_table(measured, curves)


def _at_own_threshold(measured: Measured, curve: Curve) -> list[str]:
    """Drafted length, accept length and gamma."""
    steps = (measured.once @ curve.num_steps.T)[0, 0]
    drafted = (measured.once @ curve.num_drafted.T)[0, 0] / steps
    return [f"{drafted:.2f}", *tau_gamma(curve, measured.once, measured.drawn)]


def _equal_table(measured: Measured, curves: dict[str, Curve]) -> list[str]:
    table = {name: measured.gammas(curve) for name, curve in curves.items()}
    best = [min(column) for column in zip(*table.values(), strict=True)]
    rows = [("fixed", [f"{_fixed_gamma(measured, target):.2f}" for target in TARGETS])]
    for name, gammas in table.items():
        cells = []
        for found, least, target in zip(gammas, best, TARGETS, strict=True):
            drawn = curves[name].gamma_at(measured.target(target, measured.drawn), measured.drawn)
            cells.append(bold(f"{found:.3f}", found <= least) + bracket(drawn))
        rows.append((name, cells))
    return section(
        f"### {measured.algorithm}: at equal accept length",
        "gamma, drafts verified per verification, at the accept length of fixed lengths and at "
        f"{SHARE_OF_MAX:.0%} of what full chains of {measured.chains.max_length} reach; "
        "thresholds swept, "
        "linear between them; the least is bold. In brackets: 95 % intervals over requests, wide "
        "because all rules share the spread of the prompts; the paired differences below are "
        "sharper.",
        ["method", *(f"tau {t:.3f} ({_name(n)})" for n, t in _targets(measured))],
        rows,
    )


def headline_table(pools: dict[str, tuple[Measured, dict[str, Curve]]]) -> list[str]:
    """What can be said in short: per family first, then pooled."""
    shown = (3, 5)
    rows = []
    for label, (measured, curves) in pools.items():
        for name, rival in HEADLINES:
            cells = []
            for target in shown:
                pair = curves[name], curves[rival], target
                cells += [difference(*measured.mean_difference(*pair)),
                          difference(*measured.difference(*pair))]  # fmt: skip
            rows.append((f"{label}: {name} - {rival}", cells))
    kinds = [f"{kind}, {_name(t)}" for t in shown for kind in ("per family", "pooled")]
    return section(
        "## In short",
        "Difference of gamma, the drafts verified per verification, at the accept length of fixed "
        "3 and of fixed 5, in per cent with 95 % intervals; negative: fewer. **Per family**: each "
        "family of prompts is compared at its own accept length, with a threshold of its own, and "
        "the mean over families is taken; that is what a server with one kind of traffic can "
        "expect. **Pooled**: one threshold for all families together; that is mixed traffic, where "
        "a confidence that means the same in every family can also move drafts from one family to "
        "the other. Bold: the interval is below zero; italic: above.",
        ["draft, prompts: ours - rival", *kinds],
        rows,
    )


def difference_tables(measured: Measured, curves: dict[str, Curve], title: str) -> list[str]:
    """Ours against the strongest rivals, paired over requests: per family, then pooled."""
    families: list[str | None] = [*measured.families]
    kinds: dict[str, tuple[Any, list[str | None]]] = {
        f"mean over {len(families)} families": (measured.mean_difference, families),
        "pooled": (measured.difference, [None]),
    }
    pairs = [(name, rival) for rival in RIVALS for name in (*OURS, *SHIPPED)]
    lines = []
    for kind, (differences, among) in kinds.items():
        lowered = ", ".join(f"{measured.num_lowered(t, among)} at {_name(t)}" for t in TARGETS)
        lines += section(
            f"### {title}: difference of gamma at equal accept length, {kind}",
            f"In per cent, with 95 % intervals from {NUM_RESAMPLES} paired resamples of the "
            "requests; negative: fewer drafts verified. Bold: the interval excludes zero and we "
            "win; italic: it excludes zero and we lose. Resamples in which whole drafts accept "
            f"less than that fixed length, and which are compared at theirs: {lowered}.",
            ["ours against", *map(_name, TARGETS)],
            [
                (
                    f"{name} - {rival}",
                    [difference(*differences(curves[name], curves[rival], t)) for t in TARGETS],
                )
                for name, rival in pairs
            ],
        )
    return lines


def family_table(measured: Measured, curves: dict[str, Curve], title: str) -> list[str]:
    """Where the means come from."""
    names = ["DyJoint", "logistic, margin", "logistic, largest q", *OURS, "C2T-plus, shipped"]
    rows = []
    for family in measured.families:
        weights = everyone(measured.groups, only=family)
        tau = measured.target(3, weights)
        gammas = [float(curves[name].gamma_at(tau, weights)[0]) for name in names]
        best = min(gammas)
        cells = [str(int(weights.sum())), f"{tau[0]:.3f}"]
        rows.append((family, cells + [bold(f"{g:.3f}", g <= best) for g in gammas]))
    return section(
        f"### {title}: by family, at the accept length of fixed 3",
        "gamma at the family's own accept length of fixed 3, one threshold per family.",
        ["family", "n", "tau", *names],
        rows,
    )


def variants() -> dict[str, Recipe]:
    """What was tried beside the menu: cuts of the entropy, inputs, sizes, balancing."""
    paper, log, plus = RECIPES["c2t"], RECIPES["c2t-log"], RECIPES["c2t-plus"]
    found = {
        f"C2T, M = {m}": replace(paper, names=("joint", f"entropy_top{m}", "depth"))
        for m in (100, 500, 1000)
    }
    found["C2T, M = all"] = paper
    found |= {f"C2T, {name}": RECIPES[name] for name in ABLATIONS}
    found |= {f"C2T, {h} hidden": replace(paper, hidden_sizes=(h,)) for h in (2, 6, 12, 24, 36)}
    found["C2T, no negative sampling"] = replace(paper, balance=False)
    found["C2T-log"] = log
    found["C2T-log, negative sampling"] = replace(log, balance=True)
    found["C2T-log, inputs not standardised"] = replace(log, standardise=False)
    found |= {f"C2T-log, {h} hidden": replace(log, hidden_sizes=(h,)) for h in (6, 12, 24)}
    found["C2T-plus (C2T-log + margin)"] = plus
    found["C2T-log + own log probability"] = replace(log, names=(*log.names, "log_prob"))
    found["C2T-plus + own log probability"] = replace(plus, names=(*plus.names, "log_prob"))
    found["C2T-plus, 12 hidden"] = replace(plus, hidden_sizes=(12,))
    return found


ABLATIONS = ("joint+entropy", "joint+depth", "entropy+depth")


def variant_table(measured: Measured, rival: Curve) -> list[str]:
    """Scores of classifiers that differ in one thing, and what it does to gamma."""
    layer, labels = measured.test.layer(), measured.test.nodes["accept"].float()

    def cells(parameters: object, scores: torch.Tensor, curve: Curve) -> list[str]:
        error = expected_calibration_error(scores, labels)
        gammas = [f"{g:.3f}" for g in measured.gammas(curve)]
        return [str(parameters), f"{auc(scores, labels):.4f}", f"{error:.3f}", *gammas]

    rows = [("joint probability (DyJoint)", cells(0, layer.joint, rival))]
    for name, recipe in variants().items():
        classifier = train_classifier(measured.train, recipe)
        curve = sweep(gate("c2t", classifier), measured.chains)
        told = classifier.training["parameters"], classifier.confidence(layer), curve
        rows.append((name, cells(*told)))
    return section(
        f"### {measured.algorithm}: variants of the classifier",
        "AUC and calibration error (ECE, 15 bins) over all recorded test tokens, then gamma at "
        "equal accept length. M: largest probabilities in the entropy.",
        ["classifier", "parameters", "AUC", "ECE", *map(_name, TARGETS)],
        rows,
    )


def transfer_tables(drafts: dict[str, Measured]) -> list[str]:
    """Train here, use there: between families, and between draft models."""
    lines = ["## Transfer", ""]
    for recipe in ("c2t", "c2t-log", "c2t-plus"):
        lines += _between_drafts(drafts, recipe)
    for recipe in ("c2t", "c2t-plus"):
        lines += _between_families(next(iter(drafts.values())), recipe)
    return lines


def _between_drafts(drafts: dict[str, Measured], recipe: str) -> list[str]:
    own = {name: train_classifier(m.train, RECIPES[recipe]) for name, m in drafts.items()}
    tenth = {name: share_of_prompts(m.train, FINE_TUNE_SHARE) for name, m in drafts.items()}

    def tuned(classifier: Classifier, there: str) -> Classifier:
        return train_classifier(tenth[there], RECIPES[recipe], start=classifier)

    used: dict[str, dict[str, Classifier]] = {}
    for name, classifier in own.items():
        used[name] = dict.fromkeys(drafts, classifier)
        used[f"{name}, fine-tuned"] = {there: tuned(classifier, there) for there in drafts}
    used["the column's tenth alone, from scratch"] = {
        there: train_classifier(tenth[there], RECIPES[recipe]) for there in drafts
    }
    return section(
        f"### {LABELS[recipe]}: trained on one draft model, used on another",
        "gamma at the accept length of fixed 3 of the draft in the column; in brackets the "
        "difference from DyJoint in per cent. Fine-tuned: learning rate 1e-4 on a tenth of the "
        "column's own training prompts.",
        ["trained on", *drafts],
        [
            (label, [_transferred(drafts[there], c) for there, c in row.items()])
            for label, row in used.items()
        ],
    )


def _between_families(measured: Measured, recipe: str) -> list[str]:
    family_of = measured.train.groups()
    of_draft = [family_of[i] for i in measured.train.drafts["request"].tolist()]
    everything = "all of them"
    rows = []
    for family in [*sorted(set(of_draft)), everything]:
        mask = torch.tensor([family in (f, everything) for f in of_draft])
        classifier = train_classifier(measured.train.select(mask), RECIPES[recipe])
        rows.append((family, [_transferred(measured, classifier)]))
    return section(
        f"### {LABELS[recipe]}, {measured.algorithm}: trained on one family of prompts, used on "
        "all",
        "gamma at the accept length of fixed 3 on the pooled test prompts; in brackets the "
        "difference from DyJoint in per cent.",
        ["trained on", "gamma"],
        rows,
    )


def _transferred(measured: Measured, classifier: Classifier) -> str:
    tau = measured.target(3, measured.once)
    mine = sweep(gate("c2t", classifier), measured.chains)
    a, b = (float(c.gamma_at(tau, measured.once)[0]) for c in (mine, measured.dyjoint))
    return f"{a:.3f} ({100 * (a / b - 1):+.1f})"


# --- Markdown -----------------------------------------------------------------------------------


def _name(target: int | str) -> str:
    return f"fixed {target}" if isinstance(target, int) else target


def _targets(measured: Measured) -> list[tuple[int | str, float]]:
    return [(t, float(measured.target(t, measured.once)[0])) for t in TARGETS]


def _fixed_gamma(measured: Measured, target: int | str) -> float:
    lengths = [measured.fixed(n) for n in range(measured.chains.max_length + 1)]
    names = [f.name for f in fields(Curve)]
    joined = Curve(*(np.concatenate([getattr(c, f) for c in lengths]) for f in names))
    return float(joined.gamma_at(measured.target(target, measured.once), measured.once)[0])


# --- the run ------------------------------------------------------------------------------------


def classifiers_of(measured: Measured, console: Console) -> dict[str, Classifier]:
    """Every classifier of the main table, trained on this draft's recording."""
    recipes = [r for r in LABELS if r != "mcsd-hidden" or measured.algorithm != "STANDALONE"]
    found = {}
    for recipe in recipes:
        start = time.perf_counter()
        found[recipe] = train_classifier(measured.train, RECIPES[recipe])
        console.print(f"  trained {recipe} in {time.perf_counter() - start:.1f} s")
    return found


def swept(rules: dict[str, Any], chains: Chains, console: Console) -> dict[str, Curve]:
    """The curve of each rule."""
    curves = {}
    for name, (make, grid) in rules.items():
        curves[name] = sweep(make, chains, grid)
        console.print(f"  replayed {name}")
    return curves


def draft_report(
    measured: Measured, classifiers: dict[str, Classifier], curves: dict[str, Curve]
) -> list[str]:
    """All tables of one draft model."""
    lines = main_tables(measured, curves, threshold_rules(classifiers), classifiers)
    lines += difference_tables(measured, curves, measured.algorithm)
    return lines + family_table(measured, curves, measured.algorithm)


def files(args: Namespace, console: Console) -> dict[Path, tuple[str, str, list[str]]]:
    """Record what is not recorded yet; by file, its title, conditions and tables."""
    drafts: dict[str, Measured] = {}
    others: dict[str, Measured] = {}
    for algorithm in args.algorithms:
        train = prompts("train", args.num_train[algorithm], args.train_sets)
        test = prompts("test", args.num_test[algorithm], args.test_sets)
        trained = record(algorithm, train, args.work / f"train-{algorithm}")
        tested = record(algorithm, test, args.work / f"test-{algorithm}")
        drafts[algorithm] = Measured.of(algorithm, trained, tested)
        if args.other_sets and algorithm in args.other_algorithms:
            other = other_prompts(args.num_other, args.other_sets, test + train)
            tested = record(algorithm, other, args.work / f"other-{algorithm}")
            others[algorithm] = Measured.of(algorithm, trained, tested)

    body: list[str] = []
    tried: list[str] = []
    pools: dict[str, tuple[Measured, dict[str, Curve]]] = {}
    for algorithm, measured in drafts.items():
        console.print(algorithm)
        classifiers = classifiers_of(measured, console)
        rules = threshold_rules(classifiers)
        curves = swept(rules, measured.chains, console)
        pools[algorithm] = measured, curves
        body += [f"## {algorithm}", "", *draft_report(measured, classifiers, curves)]
        if not args.no_variants:
            tried += [f"## {algorithm}", "", *variant_table(measured, measured.dyjoint)]
        if algorithm in others:
            seen = others[algorithm]
            named = {name: rules[name] for name in (*RIVALS, *OURS, *SHIPPED)}
            curves = swept(named, seen.chains, console)
            pools[f"{algorithm}, other sets"] = seen, curves
            title = f"{algorithm} on other sets"
            body += difference_tables(seen, curves, title) + family_table(seen, curves, title)
    lines = headline_table(pools) + thresholds.table(
        {name: Chains.from_recording(m.train) for name, m in drafts.items()},
        {name: m.chains for name, m in drafts.items()},
    )
    about = conditions(drafts, others)
    found = {args.out: ("Stopping rules on the demo models", about, lines + body)}
    if not args.no_variants:
        title = "Variants of the classifiers on the demo models"
        found[args.variants] = (title, about, tried + transfer_tables(drafts))
    return found


def conditions(drafts: dict[str, Measured], others: dict[str, Measured]) -> str:
    """What was measured, in one paragraph."""
    tests = "; ".join(f"{name}: {mix(m.groups)}" for name, m in drafts.items())
    learnt = "; ".join(f"{name}: {_learnt(m.train)}" for name, m in drafts.items())
    also = ""
    if others:
        of = next(iter(others.values()))
        also = (
            f"Other sets, for {', '.join(others)}: {mix(of.groups)}; no demo model learnt from "
            "them, and what shares 13 words in a row with a prompt of the first pool or of "
            "training is left out. "
        )
    return (
        f"Demo models in float32, temperature 0, at most {MAX_NEW_TOKENS} new tokens, no prefix "
        f"cache; chains of {NUM_STEPS} recorded behind every token by the "
        f"real server, rules replayed exactly. Test prompts, which no model saw: {tests}. {also}"
        f"Classifiers are trained per draft model on other prompts ({learnt}); "
        "defaults of `sglang_c2t train`, seed 0, one training each; `shipped` ones learnt from all "
        "three drafts. Thresholds are swept on the "
        "test prompts for every rule alike. One target and three small drafts on a CPU: which "
        "rule wins is a property of these models, not a law."
    )


def _learnt(train: Recording) -> str:
    family_of = train.groups()
    return mix([family_of[request] for request in train.drafts["request"].unique().tolist()])

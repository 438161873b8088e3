"""``python -m eval.tables --trees``: every tree policy on the same recorded trees.

For each demo draft: record EAGLE-2's full tree of K = 8 and six layers behind every token of
every answer, train the classifiers on other prompts' trees, replay each policy on the test
prompts, and serve a few of them live with and without exact ancestors. Counts only, no timing.
Writes ``eval/TREES.md``.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from eval.prompts import Prompt
from eval.record_default import settings_of
from eval.recordings import TREES, named_bodies, prompts, record
from eval.server import Launch, running, speculative_flags
from eval.tables.markdown import (
    bracket,
    change_at,
    difference,
    mix,
    section,
    tau_gamma,
    with_interval,
)
from eval.tables.tree_inputs import inputs_table
from sglang_c2t.classifier.checkpoint import Classifier, load_classifier
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.draft_layer import PLACES
from sglang_c2t.offline.client import run_load
from sglang_c2t.offline.compare import Array, Curve, everyone, resamples
from sglang_c2t.offline.scores import auc
from sglang_c2t.offline.train import RECIPES, train_classifier
from sglang_c2t.offline.tree_replay import Forest, TreeOutcome, replay_trees
from sglang_c2t.policies.base import TreePolicy, TreeShape
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.entropy_width import EntropyWidth
from sglang_c2t.policies.fork import Fork
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree
from sglang_c2t.policies.static_tree import StaticTree

FULL = TreeShape(TREES.topk, TREES.num_steps, TREES.num_draft_tokens)
#: EAGLE-2's own size: 60 drafted nodes.
SIXTY = FULL._replace(num_draft_tokens=61)
NUM_RESAMPLES = 1000

#: Thresholds for curves: even in log odds.
GRID = tuple(float(x) for x in 1 / (1 + np.exp(-np.linspace(-7, 3, 16))))
#: Sizes of EAGLE-2's trees, drafted nodes.
SIZES = (2, 4, 6, 8, 12, 16, 20, 26, 33, 40, 50, 60, 80, 100, 140, 200, FULL.num_candidates)
#: EAGLE-2 trees whose accept length the others are compared at.
TARGETS = (8, 16, 26, 60)
BETAS = (0.2, 0.3, 0.5, 0.7, 0.85)
RECIPES_OF = {
    "C2T": "c2t",
    "C2T-log": "c2t-log",
    "C2T-plus": "c2t-plus-tree",
    "C2T-plus without ranks": "c2t-plus",
}

#: A policy, and how large its trees may be.
Setting = tuple[TreePolicy, TreeShape]


@dataclass(frozen=True)
class Draft:
    """One draft model, the trees to measure on, and what was learnt from others."""

    algorithm: str
    groups: list[str]
    forest: Forest
    test: Recording
    classifiers: dict[str, Classifier]
    once: Array  # [1, Q]
    drawn: Array  # [S, Q]

    @classmethod
    def of(cls, algorithm: str, test: Recording, classifiers: dict[str, Classifier]) -> Draft:
        """The draft whose trees ``test`` holds."""
        forest = Forest.from_recording(test)
        groups = [rid.rsplit("/", 1)[0] for rid in forest.requests]
        weights = everyone(groups), resamples(groups, NUM_RESAMPLES)
        return cls(algorithm, groups, forest, test, classifiers, *weights)

    def replay(self, setting: Setting) -> TreeOutcome:
        """Exact wherever ``num_uncovered`` is 0."""
        return replay_trees(setting[0], self.forest, setting[1])

    def sweep(self, make: Callable[[float], Setting], grid: Sequence[float]) -> Curve:
        """One replay per threshold or size."""
        return Curve.of([self.replay(make(value)) for value in grid])


def of_size(drafts: float) -> Setting:
    """EAGLE-2 with so many drafted nodes."""
    return EAGLE2(), FULL._replace(num_draft_tokens=int(drafts) + 1)


def gated(gate: Callable[[float], Any], **options: Any) -> Callable[[float], Setting]:
    """Algorithm 1, open in its threshold."""
    return lambda beta: (GatedTree(gate(beta), **options), FULL)


def after_eagle2(gate: Callable[[float], Any]) -> Callable[[float], Setting]:
    """EAGLE-2's tree of 60 nodes, pruned afterwards; open in its threshold."""
    return lambda beta: (GatedEAGLE2(gate(beta)), SIXTY)


def curves_of(
    draft: Draft, after: Sequence[str] = ("C2T", "C2T-log")
) -> dict[str, tuple[Callable[[float], Setting], Sequence[float]]]:
    """Every rule with a threshold or a size; the classifiers ``after`` EAGLE-2 as well."""
    made: dict[str, tuple[Callable[[float], Setting], Sequence[float]]] = {
        "EAGLE-2, N": (of_size, SIZES),
        "joint threshold": (gated(DyJoint), GRID),
    }
    for name, classifier in draft.classifiers.items():
        made[name] = (gated(lambda beta, c=classifier: C2T(c, beta)), GRID)  # type: ignore[misc]
    for name in after:
        made[f"{name} on EAGLE-2 (N = 60)"] = (
            after_eagle2(lambda beta, c=draft.classifiers[name]: C2T(c, beta)),  # type: ignore[misc]
            GRID,
        )
    return made


def settings(draft: Draft) -> dict[str, Setting]:
    """Every rule at settings of its paper."""
    shallow = FULL._replace(num_steps=4)
    found: dict[str, Setting] = {"EAGLE-1 static, 25 nodes": (StaticTree(), FULL)}
    found |= {f"EAGLE-2, N = {n}": of_size(n) for n in (8, 16, 25, 40, 60, 100)}
    found |= {f"joint >= {beta:g}": (GatedTree(DyJoint(beta)), FULL) for beta in (0.3, 0.1, 0.03)}
    for name in ("C2T", "C2T-log", "C2T-plus"):
        gates = {beta: C2T(draft.classifiers[name], beta) for beta in BETAS}
        found |= {f"{name}, beta {b:g}": (GatedTree(gate), FULL) for b, gate in gates.items()}
    for name in ("C2T", "C2T-log"):
        for beta in (0.3, 0.5):
            pruned = GatedEAGLE2(C2T(draft.classifiers[name], beta)), SIXTY
            found[f"{name} on EAGLE-2 (N = 60), beta {beta:g}"] = pruned
    found["entropy-width, fixed depth 4"] = (EntropyWidth(), shallow)
    found["entropy-width, dynamic depth"] = (EntropyWidth(depth="dynamic"), FULL)
    five = FULL._replace(num_steps=5)
    found |= {f"fork, {width} chains of 5": (Fork(width=width), five) for width in (2, 4, 8)}
    return found


# --- the tables ---------------------------------------------------------------------------------


def settings_table(draft: Draft) -> list[str]:
    """Accept length and nodes of every rule where its paper puts it."""
    return section(
        f"### {draft.algorithm}: at each rule's own setting",
        "tau: tokens per verification, bonus included. gamma: nodes verified per verification, "
        "the root not counted. In brackets: 95 % intervals over requests. Not in the recording: "
        "share of expansions that a rule wanted and EAGLE-2's beam had not made; they count as "
        "leaves.",
        ["method", "tau", "gamma", "draft forwards", "not in the recording"],
        [(name, _cells(draft, draft.replay(setting))) for name, setting in settings(draft).items()],
    )


def _cells(draft: Draft, outcome: TreeOutcome) -> list[str]:
    curve = Curve.of([outcome])
    steps = float(outcome.num_steps.sum())
    each = (float(counts.sum()) / steps for counts in (outcome.num_drafted, outcome.num_uncovered))
    return [*tau_gamma(curve, draft.once, draft.drawn), *(f"{one:.2f}" for one in each)]


def equal_tau_table(draft: Draft, curves: dict[str, Curve]) -> list[str]:
    """Nodes at EAGLE-2's accept lengths, and the difference from it."""
    rival = curves["EAGLE-2, N"]
    heads = [f"tau {reached(rival, n)(draft.once)[0]:.3f} (EAGLE-2, N = {n})" for n in TARGETS]
    rows = [("EAGLE-2, N", [f"{size}.00" for size in TARGETS])]
    for name, curve in curves.items():
        if curve is rival:
            continue
        cells = []
        for size in TARGETS:
            once, drawn = (
                curve.gamma_at(reached(rival, size)(weights), weights)
                for weights in (draft.once, draft.drawn)
            )
            change = difference(100 * (once / size - 1), 100 * (drawn / size - 1))
            cells.append(f"{once[0]:.2f}, {change}")
        rows.append((name, cells))
    return section(
        f"### {draft.algorithm}: at equal accept length",
        "gamma at the accept length of EAGLE-2's trees, thresholds swept, linear between them; "
        "behind it the difference from EAGLE-2 in per cent with its 95 % interval from "
        f"{NUM_RESAMPLES} paired resamples of the requests. Bold: fewer nodes, interval off zero; "
        "italic: more.",
        ["method", *heads],
        rows,
    )


def reached(rival: Curve, size: int) -> Callable[[Array], Array]:
    """Gives the accept lengths of EAGLE-2's trees of this ``size``, for weights."""
    return lambda weights: rival.tau(weights)[:, SIZES.index(size)]


def family_table(draft: Draft, curves: dict[str, Curve], size: int = 26) -> list[str]:
    """The difference from EAGLE-2 in each family, and in all."""
    rival, groups = curves["EAGLE-2, N"], np.array(draft.groups)
    families: list[str | None] = [*sorted(set(draft.groups)), None]

    def cell(curve: Curve, family: str | None) -> str:
        mask = np.ones(len(groups)) if family is None else (groups == family).astype(float)
        weights = draft.once * mask, draft.drawn * mask
        return change_at(curve, size, reached(rival, size), weights)

    shown = [name for name in curves if curves[name] is not rival and "on EAGLE-2" not in name]
    return section(
        f"### {draft.algorithm}: by family, at EAGLE-2's accept length there with N = {size}",
        "Difference of gamma from EAGLE-2's in per cent.",
        ["method", *("all" if family is None else family for family in families)],
        [(name, [cell(curves[name], family) for family in families]) for name in shown],
    )


def variation_table(draft: Draft) -> list[str]:
    """The paper's appendix B.6: the second pruning, by beta."""
    limits: tuple[int | None, ...] = (2, 4, 8, 16, None)

    def cell(beta: float, limit: int | None) -> str:
        gate = C2T(draft.classifiers["C2T"], beta)
        outcome = draft.replay((GatedTree(gate, layer_limit=limit), FULL))
        return f"{outcome.accept_length():.3f} / {outcome.gamma():.2f}"

    return section(
        f"### {draft.algorithm}: beta and second pruning of C2T",
        "tau / gamma. Columns: at most so many nodes of a layer enter the tree, the most "
        "confident ones (the paper's topK); the draft forwards at most 8 a layer throughout.",
        ["beta", *("no limit" if limit is None else str(limit) for limit in limits)],
        [(f"{beta:g}", [cell(beta, limit) for limit in limits]) for beta in BETAS],
    )


#: Nodes on which a confidence is scored, at most.
SCORED = 300_000


def scored(draft: Draft) -> tuple[dict[str, Tensor], Tensor]:
    """Of recorded nodes, drawn alike each time, the confidences by rule and which were accepted."""
    layer, labels = draft.test.layer(PLACES), draft.test.nodes["accept"].float()
    shown = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:SCORED]
    sample = layer.take(shown)
    scores = {"joint threshold": sample.joint}
    scores |= {name: c.confidence(sample) for name, c in draft.classifiers.items()}
    return scores, labels[shown]


def classifier_table(draft: Draft, curves: dict[str, Curve]) -> list[str]:
    """Whether classifiers learn more from trees than from chains."""
    scores, truth = scored(draft)
    share = 100 * float(draft.test.nodes["accept"].float().mean())
    tau = reached(curves["EAGLE-2, N"], 26)(draft.once)
    gammas = {name: float(curves[name].gamma_at(tau, draft.once)[0]) for name in scores}
    return section(
        f"### {draft.algorithm}: classifiers on tree nodes",
        f"AUC over {len(truth)} recorded test nodes, {share:.2f} % of them "
        "accepted; gamma at the accept length of EAGLE-2, N = 26.",
        ["confidence", "AUC", "gamma"],
        [(name, [f"{auc(scores[name], truth):.4f}", f"{gammas[name]:.2f}"]) for name in scores],
    )


#: Of the test prompts, so many are served live.
NUM_LIVE = 56

#: Served live, with and without exact ancestors; trees of up to 60 nodes.
LIVE: dict[str, dict[str, Any]] = {
    "EAGLE-2, N = 60": {"policy": "eagle2"},
    "C2T-plus, shipped": {"policy": "c2t-plus"},
}


def ancestor_table(draft: Draft, texts: Sequence[Prompt], work: Path) -> list[str]:
    """What attending to true ancestors does, measured on live servers."""
    rows = [
        (name, ancestor_cells(draft.algorithm, texts, work, config, SIXTY))
        for name, config in LIVE.items()
    ]
    return section(
        f"### {draft.algorithm}: exact ancestors, live",
        f"Real servers, {len(texts)} test prompts, trees of up to 60 nodes, K = 8, six layers; "
        + ANCESTORS,
        ["method", *ANCESTOR_COLUMNS],
        rows,
    )


ANCESTORS = (
    "stock: draft nodes attend to their beam rows (sgl-project/sglang#8409). Outputs were "
    "identical. In brackets: 95 % intervals over requests; of the difference, paired."
)
ANCESTOR_COLUMNS = ("tau, stock", "tau, exact", "difference", "gamma, stock", "gamma, exact")


def ancestor_cells(
    algorithm: str, texts: Sequence[Prompt], work: Path, config: dict[str, Any], shape: TreeShape
) -> list[str]:
    """Of :data:`ANCESTOR_COLUMNS`: ``texts`` served live with and without exact ancestors."""
    bodies = named_bodies(texts, TREES.max_new_tokens)
    groups = [prompt.family for prompt in texts]
    once, drawn = everyone(groups), resamples(groups, NUM_RESAMPLES)
    found, outputs = [], []
    for exact in (False, True):
        label = f"{algorithm}-{config['policy']}-{'exact' if exact else 'stock'}"
        file = work / f"{label}.json"
        file.write_text(json.dumps({**config, "exact_ancestors": exact}))
        flags = speculative_flags(algorithm, shape.num_steps, shape.topk, shape.num_draft_tokens)
        launch = Launch(label, (*flags, "--c2t", "--c2t-config", str(file)))
        with running(launch, work) as server:
            result = run_load(server.url, bodies, concurrency=16)
        found.append(_live_curve([answer.meta_info for answer in result.answers]))
        outputs.append(result.outputs)
    if outputs[0] != outputs[1]:
        raise RuntimeError(f"{algorithm}, {config}: outputs differ with exact ancestors")
    taus = [(c.tau(once)[:, 0], c.tau(drawn)[:, 0]) for c in found]
    gammas = [f"{float(c.gamma(once)[0, 0]):.2f}" for c in found]
    return [*(with_interval(*tau) for tau in taus), signed_tau(*taus), *gammas]


def signed_tau(stock: tuple[Array, Array], exact: tuple[Array, Array]) -> str:
    """Difference of tau in per cent, paired."""
    once = 100 * (exact[0] / stock[0] - 1)
    return f"{float(once[0]):+.1f} %" + bracket(100 * (exact[1] / stock[1] - 1))


def _live_curve(metas: Sequence[dict[str, Any]]) -> Curve:
    """Counts per request from ``meta_info``; a request that needed no verification has none."""
    steps = np.array([float(meta.get("spec_verify_ct", 0)) for meta in metas])
    correct = np.array([float(meta.get("spec_num_correct_drafts", 0)) for meta in metas])
    rows = [
        sum(size * n for size, n in enumerate(meta.get("spec_cap_lens_histogram", [])))
        for meta in metas
    ]
    verified = np.array(rows, dtype=float) - steps
    return Curve(steps[None], correct[None], verified[None], verified[None])


# --- the run ------------------------------------------------------------------------------------


def learn(train: Recording) -> dict[str, Classifier]:
    """Classifiers from this draft's trees, and the shipped one, which learnt from chains."""
    found = {
        label: train_classifier(train, RECIPES[recipe], settings=settings_of(recipe))
        for label, recipe in RECIPES_OF.items()
    }
    found["C2T-plus, learnt from chains"] = load_classifier("c2t-plus")
    return found


def report(
    draft: Draft, train: Recording, texts: Sequence[Prompt], work: Path, console: Console
) -> list[str]:
    """All tables of one draft model."""
    lines = settings_table(draft)
    console.print("  replayed the settings")
    curves = {}
    for name, (make, grid) in curves_of(draft).items():
        curves[name] = draft.sweep(make, grid)
        console.print(f"  swept {name}")
    lines += equal_tau_table(draft, curves)
    lines += family_table(draft, curves)
    lines += variation_table(draft)
    lines += classifier_table(draft, curves)
    rival = curves["EAGLE-2, N"]
    lines += inputs_table(
        draft.forest,
        draft.test,
        train,
        algorithm=draft.algorithm,
        targets={size: reached(rival, size) for size in TARGETS},
        weights=(draft.once, draft.drawn),
        console=console,
    )
    lines += ancestor_table(draft, texts[:NUM_LIVE], work)
    return lines


def files(args: Namespace, console: Console) -> dict[Path, tuple[str, str, list[str]]]:
    """Record what is not recorded yet; by file, its title, conditions and tables."""
    lines: list[str] = []
    about: dict[str, None] = {}
    for algorithm in args.algorithms:
        console.print(algorithm)
        test = prompts("test", args.num_test[algorithm], args.test_sets)
        train = prompts("train", args.num_train[algorithm], args.train_sets)
        tested = record(algorithm, test, args.work / f"test-{algorithm}", TREES)
        trained = record(algorithm, train, args.work / f"train-{algorithm}", TREES)
        draft = Draft.of(algorithm, tested, learn(trained))
        about[mix(draft.groups)] = None
        lines += [f"## {algorithm}", "", *report(draft, trained, test, args.work, console)]
    return {args.out: ("Draft trees on the demo models", conditions("; ".join(about)), lines)}


def conditions(prompts: str) -> str:
    """What was measured, in one paragraph; ``prompts`` says on how many of which family."""
    return (
        "Demo models in float32, temperature 0, no prefix cache, at most "
        f"{TREES.max_new_tokens} new tokens, exact ancestors unless said; EAGLE-2's full tree "
        f"of K = {TREES.topk} and {TREES.num_steps} layers "
        f"({FULL.num_candidates} candidates) recorded behind every token by the real server, rules "
        f"replayed on it. Test prompts, which no model saw: {prompts}. Classifiers are trained per "
        "draft model on the trees of other prompts, seed 0, one training each (C2T for 200 epochs "
        "instead of the paper's 10, because ours are few); thresholds and "
        "sizes are swept on the test prompts for every rule alike. One target and three small "
        "drafts on a CPU: which rule wins is a property of these models, not a law."
    )

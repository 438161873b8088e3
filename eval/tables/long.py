"""``python -m eval.tables --long``: trees behind long prompts and in long answers.

The demo models learnt from windows of 256 tokens. Here their prompts have about 1,500, or their
answers 512, and what was learnt from short ones is asked: whether survival is still ranked well,
how many nodes that saves, and what exact ancestors bring, with deeper trees besides. Counts only,
no timing. Writes ``eval/LONG.md``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from eval.prompts import Prompt
from eval.record_default import settings_of
from eval.recordings import LONG_ANSWERS, LONG_PROMPT, TREES, long_prompts, prompts, record
from eval.tables import trees
from eval.tables.markdown import change_at, mix, section, with_interval
from eval.tables.trees import Draft
from sglang_c2t.classifier.checkpoint import load_classifier
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.offline.compare import Curve
from sglang_c2t.offline.scores import auc, expected_calibration_error
from sglang_c2t.offline.train import RECIPES, train_classifier
from sglang_c2t.policies.base import TreeShape

#: Test prompts of a family: long ones, and those with long answers.
PROMPTS, ANSWERS = 6, 2

#: Tokens of a long answer at which its parts end.
PARTS = (64, 256, LONG_ANSWERS.max_new_tokens)

#: Of each set, so many prompts are served live.
NUM_LIVE = 42

#: K, layers and nodes of the trees that are served live.
LIVE = {"K = 8, six layers": trees.SIXTY, "K = 4, ten layers": TreeShape(4, 10, 61)}


def parts(recording: Recording) -> Iterator[tuple[str, Recording]]:
    """A recording of long answers by which of their tokens the drafts stand behind."""
    request, position = (recording.drafts[name].long() for name in ("request", "position"))
    start = torch.full((len(recording.requests),), 2**31 - 1)
    behind = position - start.scatter_reduce(0, request, position, "amin")[request]
    first = 0
    for end in PARTS:
        chosen = (behind >= first) & (behind < end)
        yield f"answers, tokens {first + 1} to {end}", recording.select(chosen)
        first = end


def judged(draft: Draft) -> dict[str, list[str]]:
    """By rule AUC and calibration error of its confidences over recorded nodes."""
    scores, truth = trees.scored(draft)
    return {
        name: [f"{auc(s, truth):.3f}", f"{expected_calibration_error(s, truth):.4f}"]
        for name, s in scores.items()
    }


def comparison(draft: Draft, name: str) -> tuple[list[tuple[str, list[str]]], dict[str, Curve]]:
    """Rows of a set: how well each rule ranks it, and nodes at EAGLE-2's accept lengths; and the
    curves of all rules.
    """
    made = trees.curves_of(draft, after=())
    curves = {name: draft.sweep(make, grid) for name, (make, grid) in made.items()}
    weights, rival = (draft.once, draft.drawn), curves["EAGLE-2, N"]
    tau = with_interval(*(rival.tau(w)[:, trees.SIZES.index(26)] for w in weights))
    rows = []
    for rule, beside in judged(draft).items():
        changes = [
            change_at(curves[rule], size, trees.reached(rival, size), weights)
            for size in trees.TARGETS
        ]
        rows.append((f"{name}: {rule}", [tau, *beside, *changes]))
    return rows, curves


def comparison_table(algorithm: str, rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Of all sets."""
    return section(
        f"### {algorithm}: ranking, and nodes at equal accept length",
        "Difference of nodes from EAGLE-2's in per cent at the accept lengths that its trees of N "
        "nodes reach on the same prompts, as in TREES.md; the other columns say what those reach "
        "with 26, and how confidences rank and are calibrated over all recorded nodes. The first "
        "rows are the short prompts of TREES.md.",
        ["prompts: rule", "tau, N = 26", "AUC", "calibration error",
         *(f"N = {size}" for size in trees.TARGETS)],
        rows,
    )  # fmt: skip


def ancestors(algorithm: str, texts: dict[str, Sequence[Prompt]], work: Path) -> list[str]:
    """EAGLE-2 served live, with and without exact ancestors."""
    rows = [
        (f"{name}, {shape}", trees.ancestor_cells(algorithm, some[:NUM_LIVE], work,
                                                  {"policy": "eagle2"}, of))
        for name, some in texts.items()
        for shape, of in LIVE.items()
    ]  # fmt: skip
    return section(
        f"### {algorithm}: exact ancestors, live",
        f"Real servers, EAGLE-2's trees of 60 nodes, {NUM_LIVE} prompts, "
        f"{TREES.max_new_tokens} new tokens; " + trees.ANCESTORS,
        ["prompts, trees", *trees.ANCESTOR_COLUMNS],
        rows,
    )


def files(args: Namespace, console: Console) -> dict[Path, tuple[str, str, list[str]]]:
    """Record what is not recorded yet; by file, its title, conditions and tables."""
    lines: list[str] = []
    about: dict[str, None] = {}
    for algorithm in args.algorithms:
        console.print(algorithm)
        short = prompts("test", args.num_test[algorithm], args.test_sets)
        behind = long_prompts(PROMPTS, args.test_sets)
        learnt = prompts("train", args.num_train[algorithm], args.train_sets)
        train = record(algorithm, learnt, args.work / f"train-{algorithm}", TREES)
        classifiers = {
            "C2T-plus": train_classifier(
                train, RECIPES["c2t-plus-tree"], settings=settings_of("c2t-plus-tree")
            ),
            "C2T-plus, shipped": load_classifier("c2t-plus-tree"),
        }
        answers = record(
            algorithm,
            prompts("test", ANSWERS, args.test_sets),
            args.work / f"long-answers-{algorithm}",
            LONG_ANSWERS,
        )
        recorded = {
            "short": record(algorithm, short, args.work / f"test-{algorithm}", TREES),
            "long prompts": record(
                algorithm, behind, args.work / f"long-prompts-{algorithm}", TREES
            ),
            **dict(parts(answers)),
        }
        rows, families = [], []
        for name, recording in recorded.items():
            draft = Draft.of(algorithm, recording, classifiers)
            found, curves = comparison(draft, name)
            rows += found
            if name == "long prompts":
                families = trees.family_table(draft, curves)
            about[f"{name}: {mix(draft.groups)}"] = None
            console.print(f"  swept {name}")
        lines += [f"## {algorithm}", "", *comparison_table(algorithm, rows), *families]
        lines += ancestors(algorithm, {"short": short, "long": behind}, args.work)
    return {args.out: ("Long prompts and long answers", conditions("; ".join(about)), lines)}


def conditions(sets: str) -> str:
    """What was measured, in one paragraph; ``sets`` says on how many prompts of which family."""
    return (
        f"Long prompts: open test tasks behind solved ones of their family, up to {LONG_PROMPT} "
        f"tokens, {TREES.max_new_tokens} new ones. Long answers: {LONG_ANSWERS.max_new_tokens} "
        "tokens behind short test prompts, going on behind their end. The demo models learnt from "
        "windows of 256 tokens, so that they know little of what they do here: which is asked. "
        "float32, temperature 0, no prefix cache; EAGLE-2's full tree of "
        f"K = {TREES.topk} and {TREES.num_steps} layers behind every token, rules replayed on it. "
        "C2T-plus learnt from the draft's trees behind short prompts, the shipped one from those "
        f"of all three drafts. Prompts: {sets}. In brackets: 95 % intervals from "
        f"{trees.NUM_RESAMPLES} resamples of the requests."
    )

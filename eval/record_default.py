"""``make classifier``: record the demo models behind real servers, train the shipped classifiers.

Each draft kind drafts full chains of ten behind every token of answers to prompts that no
table and no demo uses; the three recordings are pooled, so that the shipped classifiers have
seen three calibrations. The same with trees, fewer prompts, for the classifiers that trees use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.prompts import Prompt
from eval.recordings import CHAINS, TREES, Recorded, prompts, record
from eval.server import DRAFTS
from sglang_c2t.classifier.checkpoint import SHIPPED
from sglang_c2t.cli import main as c2t
from sglang_c2t.offline.train import RECIPES as RECIPE_OF
from sglang_c2t.offline.train import TrainSettings
from sglang_c2t.policies import ON_TREES

RECIPES = ("c2t", "c2t-log", "c2t-plus", "logistic", "mcsd")
TREE_RECIPES = ("c2t", "c2t-log", "c2t-plus-tree")


def settings_of(recipe: str) -> TrainSettings:
    """How a classifier learns from our trees.

    The paper's 10 epochs are 600 steps on its 8,880 trees. Where rejected nodes are sampled
    down to the accepted ones, ours would make a tenth of that.
    """
    return TrainSettings(epochs=200) if RECIPE_OF[recipe].balance else TrainSettings()


def main(argv: Sequence[str] | None = None) -> int:
    """Record, train, write the shipped files."""
    parser = argparse.ArgumentParser(prog="python -m eval.record_default", description=__doc__)
    parser.add_argument("--train-sets", type=Path, help="folder with public prompts to learn from")
    parser.add_argument("--num-prompts", type=int, default=100, help="per family and draft kind")
    parser.add_argument("--num-tree-prompts", type=int, default=20, help="the same, for trees")
    parser.add_argument("--work", type=Path, default=Path("runs/tables"))
    parser.add_argument("--tree-work", type=Path, default=Path("runs/trees"))
    parser.add_argument(
        "--only-trees", action="store_true", help="leave those for chains as they are"
    )
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args(argv)

    if not args.only_trees:
        texts = prompts("train", args.num_prompts, args.train_sets)
        pooled = _recordings(args.work, texts, CHAINS)
        for recipe in RECIPES:
            if code := _train(pooled, recipe, args.out / f"{recipe}.safetensors"):
                return code
    texts = prompts("train", args.num_tree_prompts, args.train_sets)
    pooled = _recordings(args.tree_work, texts, TREES)
    for recipe in TREE_RECIPES:
        epochs = ("--epochs", str(settings_of(recipe).epochs))
        name = recipe.removesuffix(ON_TREES) + ON_TREES
        if code := _train(pooled, recipe, args.out / f"{name}.safetensors", *epochs):
            return code
    return 0


def _recordings(work: Path, texts: list[Prompt], what: Recorded) -> list[str]:
    """One directory per draft kind."""
    directories = [work / f"train-{algorithm}" for algorithm in sorted(DRAFTS)]
    for algorithm, directory in zip(sorted(DRAFTS), directories, strict=True):
        record(algorithm, texts, directory, what)
    return [str(directory) for directory in directories]


def _train(directories: list[str], recipe: str, out: Path, *options: str) -> int:
    return c2t(["train", *directories, "--mix-drafts", "--recipe", recipe, *options,
                "--out", str(out)])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""``make classifier``: record a pair behind real servers, train the classifiers that are shipped.

The real pair's lie in a folder of their own and judge that pair alone. The demo models' judge every
other one: each draft kind drafts full chains of ten behind every token of answers to prompts that
no table and no demo uses, and the three recordings are pooled, so that the classifiers have seen
three drafts. The same with trees, fewer prompts, for the classifiers that trees use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval.prompts import Prompt
from eval.recordings import CHAINS, NUM_STEPS, TREES, Recorded, prompts, record
from eval.server import DRAFTS
from eval.smollm2.target import TargetError
from sglang_c2t.classifier.checkpoint import SHIPPED
from sglang_c2t.cli import main as c2t
from sglang_c2t.policies import ON_TREES

#: Recipes, in the order of training.
RECIPES = {"chains": ("c2t", "c2t-log", "c2t-plus"), "trees": ("c2t", "c2t-log", "c2t-plus-tree")}


@dataclass(frozen=True)
class Source:
    """Pairs and prompts that classifiers learn from."""

    pairs: Mapping[str, Any]  # first argument of `record`, by the name of the recording
    texts: Callable[[int], list[Prompt]]
    folder: str  # among the shipped classifiers
    chains: Recorded
    trees: Recorded
    num_tree_prompts: int


def demo(train_sets: Path | None) -> Source:
    """Three drafts of the demo target, with prompts by family."""
    pairs = {algorithm: algorithm for algorithm in sorted(DRAFTS)}
    texts = partial(prompts, "train", folder=train_sets)
    return Source(pairs, texts, "", CHAINS, TREES, num_tree_prompts=20)


def real() -> Source:
    """SmolLM2 and its head, which learnt from public sets: the prompts are our own.

    Trees are smaller than the demo models', as the target is thirty times as large.
    """
    from eval.prompts import real_classifier_mix
    from eval.recordings import shuffled, smollm2

    return Source(
        {"smollm2": smollm2()}, lambda n: shuffled(real_classifier_mix(n)), "smollm2",
        Recorded(NUM_STEPS), Recorded(num_steps=5, topk=4, max_new_tokens=40), num_tree_prompts=30,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Record, train, write the shipped files."""
    parser = argparse.ArgumentParser(prog="python -m eval.record_default", description=__doc__)
    parser.add_argument("--pair", choices=("smollm2", "demo"), default="smollm2")
    parser.add_argument("--train-sets", type=Path, help="demo: folder with public prompts")
    parser.add_argument("--num-prompts", type=int, default=100,
                        help="in all; demo: per family and draft kind")  # fmt: skip
    parser.add_argument("--num-tree-prompts", type=int, help="the same, for trees (30; demo 20)")
    parser.add_argument("--work", type=Path, default=Path("runs/classifier"), help="recordings")
    parser.add_argument(
        "--only-trees", action="store_true", help="leave those for chains as they are"
    )
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args(argv)
    if args.train_sets is not None and args.pair != "demo":
        parser.error("--train-sets are what the real pair's head has learnt: only with --pair demo")
    try:
        source = demo(args.train_sets) if args.pair == "demo" else real()
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    texts = args.num_tree_prompts or source.num_tree_prompts
    kinds = {"chains": (args.num_prompts, source.chains), "trees": (texts, source.trees)}
    for kind, (num_texts, what) in kinds.items():
        if kind == "chains" and args.only_trees:
            continue
        asked, folders = source.texts(num_texts), []
        for name, pair in source.pairs.items():
            folders.append(str(args.work / kind / name))
            record(pair, asked, Path(folders[-1]), what)
        mix = ["--mix-drafts"] if len(folders) > 1 else []
        for recipe in RECIPES[kind]:
            name = recipe if kind == "chains" else recipe.removesuffix(ON_TREES) + ON_TREES
            out = args.out / source.folder / f"{name}.safetensors"
            if code := c2t(["train", *folders, *mix, "--recipe", recipe, "--out", str(out)]):
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``make classifier``: record the demo models behind real servers, train the shipped classifiers.

Each draft kind drafts full chains of ten behind every token of answers to prompts that no
table and no demo uses; the three recordings are pooled, so that the shipped classifiers have
seen three calibrations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.recordings import prompts, record
from eval.server import DRAFTS
from sglang_c2t.classifier.checkpoint import SHIPPED
from sglang_c2t.cli import main as c2t

RECIPES = ("c2t", "c2t-log", "c2t-plus", "logistic", "mcsd")


def main(argv: Sequence[str] | None = None) -> int:
    """Record, train, write the shipped files."""
    parser = argparse.ArgumentParser(prog="python -m eval.record_default", description=__doc__)
    parser.add_argument("--train-sets", type=Path, help="folder with public prompts to learn from")
    parser.add_argument("--num-prompts", type=int, default=100, help="per family and draft kind")
    parser.add_argument("--work", type=Path, default=Path("runs/tables"))
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args(argv)

    texts = prompts("train", args.num_prompts, args.train_sets)
    directories = [args.work / f"train-{algorithm}" for algorithm in sorted(DRAFTS)]
    for algorithm, directory in zip(sorted(DRAFTS), directories, strict=True):
        record(algorithm, texts, directory)
    for recipe in RECIPES:
        out = args.out / f"{recipe}.safetensors"
        argv = ["train", *map(str, directories), "--mix-drafts", "--recipe", recipe]
        if code := c2t([*argv, "--out", str(out)]):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``make tables``: all rules on the same recorded drafts, at equal accept length.

    python -m eval.tables              chains: eval/TABLES.md and eval/VARIANTS.md
    python -m eval.tables --trees      trees: eval/TREES.md
    python -m eval.tables --long       trees, long prompts and answers: eval/LONG.md

Records what is not recorded yet, trains classifiers on other prompts, replays each rule, and writes
the tables with their conditions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eval import terminal
from eval.bench import provenance
from eval.server import DRAFTS
from eval.tables import chains, long, trees


class Defaults(NamedTuple):
    """Of options whose default depends on what is recorded."""

    num_test: str
    num_train: str
    work: Path
    out: Path


CHAINS = Defaults("80", "100", Path("runs/tables"), Path("eval/TABLES.md"))
TREES = Defaults("30", "20", Path("runs/trees"), Path("eval/TREES.md"))
LONG = TREES._replace(out=Path("eval/LONG.md"))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, numbers of prompts by draft."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.tables", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--trees", action="store_true", help="tree policies, instead of chains' rules"
    )
    kind.add_argument("--long", action="store_true", help="trees behind long prompts, and the like")
    add("--test-sets", type=Path, help="folder with the public test prompts")
    add("--train-sets", type=Path, help="folder with the public training prompts")
    add("--num-test", nargs="+", metavar="N",
        help="prompts per family (80; trees 30); 80 EAGLE=40: 40 for that draft")  # fmt: skip
    add("--num-train", nargs="+", metavar="N", help="likewise (100; trees 20)")
    add("--algorithms", nargs="+", choices=sorted(DRAFTS), default=sorted(DRAFTS))
    add("--work", type=Path, help=f"recordings, kept ({CHAINS.work}; trees {TREES.work})")
    add("--out", type=Path, help=f"the tables ({CHAINS.out}; trees {TREES.out})")
    only = parser.add_argument_group("chains only")
    only.add_argument("--other-sets", type=Path, nargs="+", default=[],
                      help="folders with the files of eval.prompts.OTHER_SETS: six more families "
                      "to measure on")  # fmt: skip
    only.add_argument("--other-algorithms", nargs="+", choices=sorted(DRAFTS), default=["EAGLE3"],
                      help="drafts measured on those, too")  # fmt: skip
    only.add_argument("--num-other", type=int, default=80, help="prompts per other set")
    only.add_argument("--variants", type=Path, default=Path("eval/VARIANTS.md"))
    only.add_argument("--no-variants", action="store_true", help="leave that file as it is")
    args = parser.parse_args(argv)
    defaults = LONG if args.long else TREES if args.trees else CHAINS
    args.work, args.out = args.work or defaults.work, args.out or defaults.out
    try:
        args.num_test = per_draft(args.num_test or [defaults.num_test])
        args.num_train = per_draft(args.num_train or [defaults.num_train])
    except ValueError as error:
        parser.error(str(error))
    return args


def per_draft(words: Sequence[str]) -> dict[str, int]:
    """Prompts per family of each draft: ``80 EAGLE=40``; ValueError for anything else."""
    found = dict.fromkeys(DRAFTS, 0)
    for word in words:
        name, _, number = word.rpartition("=")
        if (name and name not in DRAFTS) or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{word!r} is no number of prompts: 80, or EAGLE=40 behind it")
        found |= {name: int(number)} if name else dict.fromkeys(DRAFTS, int(number))
    if 0 in found.values():
        raise ValueError(f"{' '.join(words)} leaves a draft without prompts: begin with a number")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Record what is not recorded yet, then write the tables."""
    args, console = arguments(argv), terminal.console()
    made = provenance.conditions("eval.tables", sys.argv[1:] if argv is None else argv)
    files = (long if args.long else trees if args.trees else chains).files(args, console)
    for path, (title, about, lines) in files.items():
        text = "\n".join([f"# {title}", "", made, "", about, "", *lines])
        path.write_text(text.rstrip() + "\n", encoding="utf-8")
        console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

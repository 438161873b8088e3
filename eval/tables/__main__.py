"""``make tables``: the paper's question on a real pair, in ``eval/TABLES.md``.

    python -m eval.tables --data DIR          GSM8K, HumanEval, MT-Bench of DIR and our own prompts
    python -m eval.tables                     HumanEval of its package and our own

Records chains and trees behind every token of greedy answers, once: a recording that is there is
taken, so that a run that was stopped goes on. Then each classifier is trained on one family of
prompts, every rule is replayed on the others, and the tables are written with their conditions.
Counts alone, which do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eval import terminal
from eval.bench import provenance
from eval.recordings import Recorded as What
from eval.recordings import real_prompts, record, smollm2
from eval.smollm2.target import TargetError
from eval.tables import report, thresholds
from eval.tables.markdown import mix
from eval.tables.rules import NUM_RESAMPLES, SETTINGS, Recorded
from sglang_c2t.offline.replay import Chains

#: A chain behind each token has 8 rows, a tree of 4 children a node 69.
CHAINS = What(num_steps=7, max_new_tokens=64)
TREES = What(num_steps=5, topk=4, max_new_tokens=32)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.tables", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--data", type=Path, help="folder with the public sets, see eval/prompts.py")
    add("--chains", type=int, default=40, metavar="N", help="prompts a family, chains (40)")
    add("--trees", type=int, default=12, metavar="N", help="prompts a family, trees (12)")
    add("--work", type=Path, default=Path("runs/tables"), help="recordings, kept (runs/tables)")
    add("--out", type=Path, default=Path("eval/TABLES.md"))
    return parser.parse_args(argv)


def tables(chains: Recorded, trees: Recorded, console: Console) -> list[str]:
    """Everything below the head."""
    parts = []
    for recorded, sizes in ((chains, report.CHAIN_SIZES), (trees, report.TREE_SIZES)):
        rules = []
        for rule in recorded.rules():
            rules.append(rule)
            learnt = f", learnt from {rule.learnt_on}" if rule.learnt_on else ""
            console.print(
                f"replayed {'trees' if recorded.trees else 'chains'}: {rule.name}{learnt}"
            )
        parts.append(report.Comparison(recorded, rules, sizes))
    lines = [
        "## In short", "",
        "Verified drafts at equal accept length, mean over the families trained on, where the "
        "interval is off zero; **more is a loss**.", "",
        *(line for part in parts for line in part.losses()), "",
        *report.acceptance_table(chains),
    ]  # fmt: skip
    for part in parts:
        lines += part.each_table() + part.pooled_table()
    assert isinstance(chains.replayed, Chains)
    return lines + thresholds.table(chains.replayed)


def conditions(chains: Recorded, trees: Recorded, pair: str) -> str:
    """Models, prompts and method of the measurement, in one paragraph."""
    return (
        f"{pair} in float32, temperature 0, no prefix cache. Chains of {CHAINS.num_steps} behind "
        f"every token of answers of at most {CHAINS.max_new_tokens} tokens ({mix(chains.groups)} "
        f"prompts); EAGLE-2's full trees of K = {TREES.topk} and {TREES.num_steps} layers, "
        f"{trees.largest} nodes, at most {TREES.max_new_tokens} tokens ({mix(trees.groups)}). "
        "The head learnt from none of these prompts. Recorded by the real server, rules replayed "
        "on it (exactly, but that a node which a tree rule expands and EAGLE-2 did not stays a "
        "leaf), thresholds swept on the tested prompts for every rule in the same way. "
        "A classifier is trained on the recording of one family (seed 0, as "
        f"`sglang_c2t train` does, {SETTINGS.steps} steps) and tested on the others; "
        "`logistic` against it has learnt from the same family. In brackets 95 % intervals from "
        f"{NUM_RESAMPLES} paired resamples of the requests within their families; bold: fewer "
        "beyond the interval, italic: more. Which rule wins is a property of these models."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Record what is not recorded yet, then write the tables."""
    args, console = arguments(argv), terminal.console()
    made = provenance.conditions("eval.tables", sys.argv[1:] if argv is None else argv)
    try:
        pair = smollm2()
        chains, trees = (
            Recorded.of(record(pair, real_prompts(n, args.data), args.work / name, what))
            for name, n, what in (("chains", args.chains, CHAINS), ("trees", args.trees, TREES))
        )
    except (TargetError, ValueError) as error:
        print(f"python -m eval.tables: error: {error}", file=sys.stderr)
        return 2
    about = conditions(chains, trees, pair.name)
    lines = ["# Rules on a real pair", "", made, "", about, "", *tables(chains, trees, console)]
    args.out.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    console.print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

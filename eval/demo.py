"""``make demo``: the same mixed batch on real servers, and one table.

No speculation, SGLang's fixed-length chains, and ``--c2t``, one after the other on this
machine, with the demo models: three servers and a short load, or with ``--full`` the README's
table. Exit code 1 if any greedy output differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from eval import terminal
from eval.bench.provenance import git_revision
from eval.prompts import Prompt, demo_mix
from eval.server import DRAFTS, Launch, Server, running, speculative_flags
from sglang_c2t import __version__
from sglang_c2t.offline.client import LoadResult, differing, greedy, run_load
from sglang_c2t.offline.metrics import SpecTotals

WARM_UP_REQUESTS = 8

#: What is compared when nothing else is asked for: enough to see every column move.
SHORT: dict[str, Any] = {
    "fixed": [5], "policies": ["c2t"], "num_prompts": 48, "max_new_tokens": 64, "concurrency": [16],
}  # fmt: skip
#: The README's table.
FULL: dict[str, Any] = {
    "fixed": [3, 5], "policies": ["c2t", "c2t-plus"], "num_prompts": 96, "max_new_tokens": 96,
    "concurrency": [16, 64],
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table: a method at a concurrency."""

    method: str
    concurrency: int
    tokens_per_second: float
    accept_length: float | None
    gamma: float | None
    target_rows: int
    draft_forwards: int
    outputs: list[tuple[int, ...]]


def methods(args: argparse.Namespace) -> list[Launch]:
    """What is compared, the baseline first: plain chains, then ``--c2t`` with each policy."""
    chains = [Launch(f"fixed {n}", speculative_flags(args.algorithm, n)) for n in args.fixed]
    longest = speculative_flags(args.algorithm, args.num_steps)
    gated = [Launch(name, (*longest, "--c2t", "--c2t-policy", name)) for name in args.policies]
    return [Launch("no speculation"), *chains, *gated]


def measure(
    server: Server,
    method: str,
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    progress: Progress,
) -> list[Row]:
    """Run every concurrency on one server; each starts from an empty cache."""
    bodies = [greedy(prompt.text, args.max_new_tokens) for prompt in prompts]
    run_load(server.url, bodies[:WARM_UP_REQUESTS], concurrency=WARM_UP_REQUESTS)
    rows = []
    for concurrency in args.concurrency:
        server.flush_cache()
        task = progress.add_task(f"{method}, {concurrency} at a time", total=len(bodies))
        before = Counter(server.c2t_state()["counters"])
        result = run_load(
            server.url,
            bodies,
            concurrency=concurrency,
            on_answer=functools.partial(progress.advance, task),
        )
        work = Counter(server.c2t_state()["counters"])
        work.subtract(before)
        rows.append(summarise(method, concurrency, result, work))
    return rows


def summarise(method: str, concurrency: int, result: LoadResult, work: Counter[str]) -> Row:
    """One line of the table; ``work`` counts what the server's forwards did meanwhile."""
    totals = SpecTotals.from_meta_infos(answer.meta_info for answer in result.answers)
    return Row(
        method=method,
        concurrency=concurrency,
        tokens_per_second=result.output_tokens / result.seconds,
        accept_length=totals.accept_length,
        gamma=totals.gamma,
        target_rows=work["target_decode_rows"] + work["verify_rows"],
        draft_forwards=work["draft_forwards"],
        outputs=result.outputs,
    )


def mismatches(rows: Sequence[Row]) -> list[str]:
    """One sentence per method and concurrency whose outputs differ from the first row's."""
    reference = rows[0].outputs
    found = []
    for row in rows[1:]:
        wrong = differing(reference, row.outputs)
        if wrong:
            found.append(
                f"{row.method} at concurrency {row.concurrency}: {len(wrong)} of "
                f"{len(reference)} outputs differ, first at prompt {wrong[0]}"
            )
    return found


def conditions(args: argparse.Namespace, prompts: Sequence[Prompt]) -> str:
    """What the numbers depend on, in one paragraph."""
    families = Counter(prompt.family for prompt in prompts)
    mix = ", ".join(f"{n} {family}" for family, n in families.items())
    return (
        f"sglang-c2t {__version__} at {git_revision()}, SGLang {version('sglang')}, "
        f"torch {torch.__version__}, {platform.machine()} CPU, {os.cpu_count()} cores, "
        "one thread a process, float32; demo models, "
        f"{args.algorithm} draft; {len(prompts)} prompts ({mix}), temperature 0, at most "
        f"{args.max_new_tokens} new tokens; servers run one after the other; one run, no repeats. "
        "Tiny models on a CPU: tokens/s says nothing about a GPU; the other columns count work."
    )


def table(rows: Sequence[Row]) -> Table:
    """The comparison, the ratio taken within the same concurrency."""
    baseline = {
        row.concurrency: row.tokens_per_second for row in rows if row.method == rows[0].method
    }
    result = terminal.table(
        None, "at once", "method", "tokens/s", "ratio", "tau", "gamma", "target rows",
        "draft forwards", "identical",
    )  # fmt: skip
    for row in sorted(rows, key=lambda row: row.concurrency):
        result.add_row(
            str(row.concurrency),
            row.method,
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second / baseline[row.concurrency]:.2f}",
            _number(row.accept_length),
            _number(row.gamma),
            str(row.target_rows),
            str(row.draft_forwards),
            "yes" if row.outputs == rows[0].outputs else "NO",
        )
    return result


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was typed, over the short demo's settings or the full one's."""
    parser = argparse.ArgumentParser(prog="python -m eval.demo", description=__doc__)
    parser.add_argument("--algorithm", choices=sorted(DRAFTS), default="EAGLE3")
    parser.add_argument("--num-steps", type=int, default=5, help="longest draft under --c2t")
    parser.add_argument("--full", action="store_true", help="the README's table: five servers")

    def add(name: str, help: str = "", **kwargs: Any) -> None:
        short, full = (
            " ".join(map(str, value)) if isinstance(value, list) else value
            for value in (SHORT[name], FULL[name])
        )
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, help=f"{help}default: {short}; with --full: {full}", **kwargs)

    add("fixed", "chain lengths to compare with; ", type=int, nargs="+")
    add("policies", "gates to compare; ", nargs="+")
    add("num_prompts", type=int)
    add("max_new_tokens", type=int)
    add("concurrency", "requests at a time; ", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="logs and raw rows")
    args = parser.parse_args(argv)
    for name, value in (FULL if args.full else SHORT).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every output is identical."""
    args = arguments(argv)
    console = terminal.console(width=110)
    prompts = demo_mix(args.num_prompts)
    rows: list[Row] = []
    with terminal.bars(console) as progress:
        for launch in methods(args):
            starting = progress.add_task(f"{launch.name}: starting the server", total=None)
            with running(launch, args.out) as server:
                progress.update(starting, total=1, completed=1)
                rows += measure(server, launch.name, prompts, args, progress)

    (args.out / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    console.print(conditions(args, prompts))
    console.print(table(rows))
    console.print(
        "tau: tokens per verification, bonus included. gamma: drafts verified per "
        "verification. target rows: counted in the target's forwards."
    )
    found = mismatches(rows)
    console.print("outputs identical: yes" if not found else "outputs identical: NO")
    for sentence in found:
        console.print(sentence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

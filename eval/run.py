"""Benchmark of speculation methods on real servers, over a mixed batch of prompts.

    python -m eval.run eval/configs/demo.toml --out runs/bench
    python -m eval.report runs/bench

The configuration says which model pair, methods, prompts and concurrencies; those in
``eval/configs`` explain every key. Each measured cell (method, temperature, concurrency, repeat)
is one file as soon as it is there, with the record of every request: a run that was interrupted
goes on where it stopped.

Exit code 0: all cells are measured, all outputs that must be equal are, and the servers' metrics
agree with the requests. 1: not so; what is wrong is printed and kept in DIR/checks.json. 2: the
command or the configuration is wrong. 3: the seconds of --budget-s are spent, the same command
goes on. 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from eval import terminal
from eval.bench.checks import compare_run_outputs, metric_disagreements
from eval.bench.config import BenchConfig, as_dict, changed, read_config
from eval.bench.datasets import Dataset, load
from eval.bench.methods import PlannedCell, launches, plan, record_of, tokenizer_of, write_files
from eval.bench.provenance import provenance
from eval.bench.records import (
    RUN_FILE,
    RecordError,
    Run,
    flat,
    has_cell,
    read_cells,
    read_run,
    write_run,
)
from eval.bench.runner import Budget, OutOfTime, Runner
from eval.server import Launch
from eval.smollm2.target import TargetError
from sglang_c2t.config import ConfigError
from sglang_c2t.files import write_whole
from sglang_c2t.offline.servers import interrupted_by_sigterm

CHECKS_FILE = "checks.json"
UNFINISHED, INTERRUPTED = 3, 130

#: May differ when a run continues: more repeats only add cells.
EXTENSIBLE = ("config.repeats",)


@dataclass(frozen=True)
class Verdict:
    """Contents of checks.json."""

    failures: list[str]
    output_differences: list[str]
    outputs_compared: int
    metric_disagreements: list[str]
    cells_with_metrics: int
    unreadable: list[str]
    missing_cells: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module for exit codes."""
    args = _parser().parse_args(argv)
    console = terminal.console(width=110)
    try:
        config = read_config(args.config)
        if args.prompts:
            load = [{**one, "prompts": args.prompts} for one in as_dict(config)["load"]]
            config = changed(config, load=load)
        known = [method.name for method in config.methods]
        if unknown := set(args.only) - set(known):
            known_names = ", ".join(known)
            raise ConfigError(f"--only: no method {unknown.pop()!r}; known: {known_names}")
        cells = plan(config, args.only, args.at_once)
        servers = launches(config, args.out / "logs")
        if args.list:
            console.print(*listing(config, cells), sep="\n", markup=False)
            return 0
        return _measure(args, config, cells, servers, console)
    except (ConfigError, RecordError, TargetError) as error:
        print(f"eval.run: {error}", file=sys.stderr)
        return 2
    except OutOfTime:
        console.print("the budget is spent; the same command goes on where this one stopped")
        return UNFINISHED
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("config", type=Path, help="a .toml file, such as eval/configs/demo.toml")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of the run (%(default)s)")
    add("--only", nargs="+", default=[], metavar="METHOD", help="measure these methods only")
    add("--at-once", nargs="+", type=int, default=[], metavar="N", help="these concurrencies only")
    add("--prompts", nargs="+", type=int, metavar="N", help="prompts sent at each concurrency")
    add("--budget-s", type=float, default=math.inf, help="seconds of this call")
    add("--revision", help="of this code, where there is no git")
    add("--data", type=Path, default=Path(), help="folder with files of public prompt sets")
    add("--list", action="store_true", help="print what would be measured; no run")
    return parser


def _measure(
    args: argparse.Namespace, config: BenchConfig, cells: Sequence[PlannedCell],
    servers: Mapping[str, Launch], console: Console,
) -> int:  # fmt: skip
    from sglang.benchmark.utils import get_tokenizer

    budget = Budget(args.budget_s)
    tokenizer = tokenizer_of(config.model)
    dataset = load(config.dataset, get_tokenizer(tokenizer), [args.data])
    run = open_run(args.out, config, dataset, args.revision)
    console.print(amount(config, cells))
    runner = Runner(config, args.out, dataset.samples, tokenizer, servers, console, budget)
    write_files(config, args.out / "logs")
    with interrupted_by_sigterm():
        runner.run(cells)
    verdict = judge(args.out, config, run, cells, runner.failures)
    text = json.dumps(asdict(verdict), indent=1) + "\n"
    write_whole({args.out / CHECKS_FILE: lambda path: path.write_text(text)})
    return report(verdict, console, may_differ=config.requests.equal_outputs == "report")


def open_run(
    folder: Path, config: BenchConfig, dataset: Dataset, revision: str | None = None
) -> Run:
    """Begin a run, or continue the one in ``folder`` if its conditions are the same."""
    methods = tuple(record_of(config, method, folder / "logs") for method in config.methods)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    origin = provenance(["python", "-m", "eval.run", *sys.argv[1:]])
    origin["revision"] = revision or origin["revision"]
    run = Run(started, as_dict(config), origin, dataset.facts, methods)
    if (folder / RUN_FILE).exists():
        found = read_run(folder)
        if differing := differing_conditions(found, run):
            raise RecordError(
                f"{folder} was measured under other conditions: {'; '.join(differing)}. Choose "
                "another folder with --out, or delete this one"
            )
        run = Run(found.started, run.config, found.provenance, found.dataset, found.methods)
    write_run(folder, run)
    return run


def differing_conditions(found: Run, wanted: Run) -> list[str]:
    """Conditions in which two runs differ, each as ``key: then -> now``."""
    then, now = _conditions(found), _conditions(wanted)
    return [
        f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and key not in EXTENSIBLE
    ]


def _conditions(run: Run) -> dict[str, Any]:
    return flat(
        {
            "config": run.config,
            "dataset": {key: run.dataset.get(key) for key in ("n", "sha256")},
            "methods": [asdict(method) for method in run.methods],
            **{key: run.provenance.get(key) for key in ("versions", "revision", "hardware")},
        }
    )


def judge(
    folder: Path, config: BenchConfig, run: Run, cells: Sequence[PlannedCell],
    failures: Sequence[str],
) -> Verdict:  # fmt: skip
    """Check everything in ``folder``, what earlier calls measured included."""
    measured, unreadable = read_cells(folder)
    outputs = compare_run_outputs(measured, run)
    gated = {method.name for method in config.methods if method.gated}
    with_metrics = [c for c in measured if c.method in gated and config.server.metrics]
    return Verdict(
        failures=list(failures),
        output_differences=[str(one) for one in outputs if one.prompts],
        outputs_compared=sum(one.compared for one in outputs),
        metric_disagreements=[s for cell in with_metrics for s in metric_disagreements(cell)],
        cells_with_metrics=len(with_metrics),
        unreadable=unreadable,
        missing_cells=sum(not has_cell(folder, cell.key) for cell in cells),
    )


def report(verdict: Verdict, console: Console, *, may_differ: bool = False) -> int:
    """Print the verdict; the exit code."""
    wrong = [*verdict.unreadable, *verdict.metric_disagreements]
    lines = [
        *wrong,
        *verdict.output_differences,
        f"outputs compared with the baseline's: {verdict.outputs_compared}, cells with "
        f"differences: {len(verdict.output_differences)}",
        f"cells whose metrics were compared with their requests: {verdict.cells_with_metrics}, "
        f"disagreements: {len(verdict.metric_disagreements)}",
    ]
    if verdict.missing_cells:
        lines.append(f"{verdict.missing_cells} cells are missing; the same command tries again")
    console.print(*lines, sep="\n", markup=False)
    differing = () if may_differ else verdict.output_differences
    return 1 if wrong or verdict.failures or verdict.missing_cells or differing else 0


def listing(config: BenchConfig, cells: Sequence[PlannedCell]) -> list[str]:
    """Lines that name the methods, the loads, and the amount of work."""
    names = {cell.key.method for cell in cells}
    loads = sorted({(c.key.temperature, c.key.concurrency, c.prompts) for c in cells})
    return [
        *(f"{method.name}: {method.kind}" for method in config.methods if method.name in names),
        *(f"temperature {t:g}, {c} at once: {n} prompts" for t, c, n in loads),
        amount(config, cells),
    ]  # fmt: skip


def amount(config: BenchConfig, cells: Sequence[PlannedCell]) -> str:
    """The number of cells, methods, requests and tokens."""
    names = {cell.key.method for cell in cells}
    num_requests = sum(cell.prompts for cell in cells)
    tokens = num_requests * config.requests.max_new_tokens
    return (
        f"{config.name}: {len(cells)} cells ({len(names)} methods, {config.repeats} repeats), "
        f"{num_requests} requests, {tokens} tokens at most"
    )


if __name__ == "__main__":
    sys.exit(main())

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
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval import terminal
from eval.bench.checks import compare_run_outputs, metric_disagreements
from eval.bench.config import ADAPTIVE, BenchConfig, as_dict, named, read_config
from eval.bench.datasets import Dataset, load
from eval.bench.methods import (
    Host,
    PlannedCell,
    hosts,
    plan,
    record_of,
    tokenizer_of,
    write_files,
)
from eval.bench.provenance import provenance
from eval.bench.records import (
    RUN_FILE,
    RecordError,
    Run,
    has_cell,
    read_cells,
    read_run,
    write_run,
)
from eval.bench.runner import Budget, OutOfTime, Runner
from eval.gpu.models import SHAPES
from eval.server import DRAFTS
from eval.smollm2.target import TargetError
from sglang_c2t.config import ConfigError
from sglang_c2t.files import write_whole

CHECKS_FILE = "checks.json"
UNFINISHED, INTERRUPTED = 3, 130

#: May differ when a run goes on: more repeats only add cells.
EXTENSIBLE = ("config.repeats",)


@dataclass(frozen=True)
class Verdict:
    """What checks.json holds."""

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
        if args.algorithm is not None:
            config = drafting_by(config, args.algorithm)
        if args.shape is not None:
            config = shaped(config, args.shape)
        if args.flags:
            config = flagged(config, shlex.split(args.flags))
        if args.prompts:
            config = sending(config, tuple(args.prompts))
        _check_names(args.only, config)
        cells = plan(config, args.only, args.at_once)
        servers = hosts(config, args.out / "logs")
        if args.list:
            console.print(listing(cells, servers), *ladder(cells), sep="\n")
            console.print(amount(config, cells, servers))
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
        prog="python -m eval.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="a .toml file, such as eval/configs/demo.toml")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), help="folder of the run (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="METHOD", help="measure these methods only"
    )
    parser.add_argument(
        "--at-once", nargs="+", type=int, default=[], metavar="N", help="these concurrencies only"
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="send so many, a number for each concurrency of the configuration",
    )
    parser.add_argument(
        "--algorithm", choices=sorted(DRAFTS), help="draft by this one, not the configuration's"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="serve this one, not the configuration's"
    )
    parser.add_argument(
        "--flags", metavar="'--A 1 --B'", default="", help="further ones for every server"
    )
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds of this call")
    parser.add_argument("--revision", help="of this code, where there is no git")
    parser.add_argument("--data", type=Path, help="folder with files of public prompt sets")
    parser.add_argument("--list", action="store_true", help="print what would be measured; no run")
    return parser


def sending(config: BenchConfig, prompts: tuple[int, ...]) -> BenchConfig:
    """The same run with other numbers of prompts; ConfigError unless one for each concurrency."""
    return replace(config, load=tuple(replace(load, prompts=prompts) for load in config.load))


def shaped(config: BenchConfig, shape: str) -> BenchConfig:
    """The same run with models of another shape; ConfigError where it has real ones."""
    pair, size = named(config.model.target)
    if size not in SHAPES:
        raise ConfigError(f"--shape replaces a shape, and this run serves {config.model.target}")
    model = replace(config.model, target=f"{pair}:{shape}", draft=f"{pair}:{shape}")
    return replace(config, name=f"{config.name}, {shape}", model=model)


def flagged(config: BenchConfig, flags: Sequence[str]) -> BenchConfig:
    """The same run, its servers started with further flags of SGLang's; of two equal ones the last
    holds.
    """
    return replace(config, server=replace(config.server, flags=(*config.server.flags, *flags)))


def drafting_by(config: BenchConfig, algorithm: str) -> BenchConfig:
    """The same run with another draft, without the methods that SGLang has not for it."""
    return replace(
        config,
        name=f"{config.name}, {algorithm}",
        model=replace(config.model, algorithm=algorithm),
        methods=tuple(
            method
            for method in config.methods
            if algorithm in ADAPTIVE or method.kind != "adaptive"
        ),
    )


def _check_names(only: Sequence[str], config: BenchConfig) -> None:
    known = [method.name for method in config.methods]
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only {name!r} is no method of this run; known: {', '.join(known)}"
            )


def _measure(
    args: argparse.Namespace,
    config: BenchConfig,
    cells: Sequence[PlannedCell],
    servers: Sequence[Host],
    console: Console,
) -> int:
    budget = Budget(args.budget_s)
    tokenizer = tokenizer_of(config.model)
    dataset = _dataset(args, config, tokenizer)
    run = open_run(args.out, config, dataset, args.revision)
    console.print(amount(config, cells, servers))
    runner = Runner(config, args.out, dataset.samples, tokenizer, servers, console, budget)
    write_files(config, args.out / "logs")
    with terminal.interrupted_by_sigterm():
        runner.run(cells)
    verdict = judge(args.out, config, run, cells, runner.failures)
    text = json.dumps(asdict(verdict), indent=1) + "\n"
    write_whole({args.out / CHECKS_FILE: lambda path: path.write_text(text)})
    return report(verdict, console, may_differ=config.requests.equal_outputs == "report")


def _dataset(args: argparse.Namespace, config: BenchConfig, tokenizer: str) -> Dataset:
    from sglang.benchmark.utils import get_tokenizer

    folders = [folder for folder in (args.data, Path(config.dataset.data or ".")) if folder]
    return load(config.dataset, get_tokenizer(tokenizer), folders)


def open_run(
    folder: Path, config: BenchConfig, dataset: Dataset, revision: str | None = None
) -> Run:
    """Begin a run, or go on with the one in ``folder`` if its conditions are the same."""
    methods = tuple(record_of(config, method, folder / "logs") for method in config.methods)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    came_from = provenance(["python", "-m", "eval.run", *sys.argv[1:]])
    came_from["revision"] = revision or came_from["revision"]
    run = Run(started, as_dict(config), came_from, dataset.facts, methods)
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
    """What keeps two runs from being one, each as ``key: then -> now``."""
    then, now = _conditions(found), _conditions(wanted)
    return [
        f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and key not in EXTENSIBLE
    ]


def _conditions(run: Run) -> dict[str, Any]:
    return _flat(
        {
            "config": run.config,
            "dataset": {key: run.dataset.get(key) for key in ("n", "sha256")},
            "methods": [asdict(method) for method in run.methods],
            **{key: run.provenance.get(key) for key in ("versions", "revision", "hardware")},
        }
    )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested tables and lists, by their dotted names."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = dict(enumerate(value)).items()
    else:
        return {name: value}
    return {
        key: leaf
        for part, inner in items
        for key, leaf in _flat(inner, f"{name}.{part}" if name else str(part)).items()
    }


def judge(
    folder: Path,
    config: BenchConfig,
    run: Run,
    cells: Sequence[PlannedCell],
    failures: Sequence[str],
) -> Verdict:
    """Check everything that is in ``folder``, what earlier calls measured included."""
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
    for sentence in (
        *verdict.unreadable,
        *verdict.output_differences,
        *verdict.metric_disagreements,
    ):
        console.print(sentence, markup=False)
    console.print(
        f"outputs compared with the baseline's: {verdict.outputs_compared}, cells with "
        f"differences: {len(verdict.output_differences)}"
    )
    console.print(
        f"cells whose metrics were compared with their requests: {verdict.cells_with_metrics}, "
        f"disagreements: {len(verdict.metric_disagreements)}"
    )
    if verdict.missing_cells:
        console.print(
            f"{verdict.missing_cells} cells are missing; the same command tries them again"
        )
    bad = (
        verdict.failures,
        verdict.unreadable,
        verdict.metric_disagreements,
        verdict.missing_cells,
        () if may_differ else verdict.output_differences,
    )
    return 1 if any(bad) else 0


def listing(cells: Sequence[PlannedCell], servers: Sequence[Host]) -> Table:
    """What would be measured: methods, their servers and how each is started."""
    names = {cell.key.method for cell in cells}
    table = terminal.table(None, "method", "kind", "server")
    for host in servers:
        for method in host.methods:
            if method.name in names:
                table.add_row(method.name, method.kind, host.name)
    return table


def ladder(cells: Sequence[PlannedCell]) -> list[str]:
    """One line for each rung."""
    rungs = sorted({(c.key.temperature, c.key.concurrency, c.prompts) for c in cells})
    ramps = {c.key.temperature for c in cells if c.arrivals}
    return [
        f"temperature {t:g}, {c} at once{' at the top of a ramp' * (t in ramps)}: {n} prompts"
        for t, c, n in rungs
    ]


def amount(config: BenchConfig, cells: Sequence[PlannedCell], servers: Sequence[Host]) -> str:
    """How much there is to do."""
    names = {cell.key.method for cell in cells}
    needed = [host for host in servers if any(m.name in names for m in host.methods)]
    num_requests = sum(cell.prompts for cell in cells)
    tokens = num_requests * config.requests.max_new_tokens
    return (
        f"{config.name}: {len(cells)} cells ({len(names)} methods, {len(needed)} servers, "
        f"{config.repeats} repeats), "
        f"{num_requests} requests, {tokens} tokens at most"
    )


if __name__ == "__main__":
    sys.exit(main())

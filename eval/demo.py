"""``make demo``: what speculation gains on this machine, on real servers, in one table.

A short run of the benchmark (:mod:`eval.run`, ``eval/configs/short.toml``), begun anew each time,
and what its records come to. Where the real pair cannot be had, a part of the demo models' run.
Exit code 1 if a greedy output differs, or as :mod:`eval.run` says.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from eval import run, terminal
from eval.bench.records import CELLS
from eval.report.cells import Results, load
from eval.report.tables import DRAFT_FORWARDS, TARGET_ROWS
from eval.report.verdict import output_sentence
from eval.smollm2.prompts import PackageError, humaneval
from eval.smollm2.target import NAME, TargetError, target_folder
from sglang_c2t.plan.cost import StepCost

CONFIGS = Path(__file__).parent / "configs"
REAL: tuple[str, ...] = (str(CONFIGS / "short.toml"),)
#: The same methods of the demo models, as far as their run has them.
TINY = (
    str(CONFIGS / "demo.toml"),
    *("--only", "no speculation", "fixed 3", "fixed 5", "auto"),
    *("--at-once", "8", "64"),
)
FOLDER = Path("runs/demo")

#: The only one that is shown.
TEMPERATURE = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; see the module for exit codes."""
    argparse.ArgumentParser(prog="python -m eval.demo", description=__doc__).parse_args(argv)
    shutil.rmtree(FOLDER, ignore_errors=True)
    chosen = REAL
    try:
        target_folder()
        humaneval()
    except (TargetError, PackageError) as error:
        print(f"On the tiny demo models, as the real pair cannot be had: {error}")
        chosen = TINY
    code = run.main([*chosen, "--out", str(FOLDER)])
    if code > 1 or not (FOLDER / CELLS).is_dir():
        return code
    results = load(FOLDER)
    console = terminal.console(width=110)
    console.print(conditions(results), markup=False)
    console.print(table(results))
    console.print(
        "ratio: of tokens/s, to no speculation. tau: tokens per verification, bonus included. "
        "gamma: drafts verified per verification. target rows: counted in the target's forwards."
    )
    console.print(draft_share(results))
    console.print(output_sentence(results).text)
    return code


def conditions(results: Results) -> str:
    """What the numbers depend on, in one paragraph."""
    config, machine = results.run.config, results.run.provenance["hardware"]
    versions = results.run.provenance["versions"]
    mix = ", ".join(f"{n} {name}" for name, n in Counter(results.prompts.values()).items())
    tiny = config["model"]["target"] == "demo"
    target = "4.5M parameters of ours, their" if tiny else f"{NAME}, its"
    return (
        f"sglang-c2t {versions['sglang-c2t']} at {results.run.provenance['revision']}, SGLang "
        f"{versions['sglang']}, torch {versions['torch']}; {machine['cpu']}, {machine['cores']} "
        f"cores, one thread a process, float32; target {target} {config['model']['algorithm']} "
        f"draft of ours; {len(results.prompts)} prompts ({mix}), greedy, at most "
        f"{config['requests']['max_new_tokens']} new tokens; repeats: {config['repeats']}. "
        "Expect a tenth or two of difference in the next run. `make bench` gives intervals."
    )


def table(results: Results) -> Table:
    """The comparison, ratios taken within the same concurrency."""
    found = terminal.table(
        None, "at once", "method",
        numbers=("tokens/s", "ratio", "tau", "gamma", "target rows", "draft forwards", "identical"),
    )  # fmt: skip
    for concurrency in results.concurrencies(TEMPERATURE):
        for name in results.names:
            at = (name, TEMPERATURE, concurrency)
            if (speed := results.speed(*at)) is None:
                found.add_row(str(concurrency), name, "failed", *["-"] * 6)
                continue
            base = results.baseline
            ratio = base and results.ratio(name, base, TEMPERATURE, concurrency)
            spec = results.acceptance(*at)
            work = [sum(cell.work[key] for cell in results.of(*at) for key in keys)
                    for keys in (TARGET_ROWS, DRAFT_FORWARDS)]  # fmt: skip
            found.add_row(
                str(concurrency),
                name,
                f"{speed.mean:.0f}",
                f"{ratio.value:.2f}" if ratio else "-",
                f"{spec.tau.value:.2f}" if spec else "-",
                f"{spec.gamma.value:.2f}" if spec and spec.gamma else "-",
                *map(str, work),
                "-" if not ratio else "NO" if differs(results, name, concurrency) else "yes",
            )
    return found


def differs(results: Results, name: str, concurrency: int) -> bool:
    """Whether outputs here are others than without speculation."""
    differences = results.outputs[name].differences
    return any(one.cell.concurrency == concurrency for one in differences)


def draft_share(results: Results) -> str:
    """What a draft layer costs beside the target, as planners have measured it while serving."""
    shares = []
    for key, cell in sorted(results.cells.items()):
        if cell.planner:
            cost = StepCost()
            cost.restore(cell.planner["cost_ms"])
            layer, target = float(cost.layer(key.concurrency)), float(cost.verify(key.concurrency))
            shares.append(
                f"{key.concurrency} at once {layer / target:.0%} ({layer:.1f} of {target:.1f} ms)"
            )
    return (
        "A draft layer beside a target forward of as many rows, as the planner measured them: "
        f"{', '.join(shares) or 'nothing measured'}. Beside an 8B target it is 4 to 8 %."
    )


if __name__ == "__main__":
    sys.exit(main())

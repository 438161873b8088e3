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
from eval.report.results import Results, load
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
    console.print(output_sentence(results).strip("*"))
    return code


def conditions(results: Results) -> str:
    """Versions, hardware, models and prompts, in one paragraph."""
    config, machine = results.run.config, results.run.provenance["hardware"]
    versions = results.run.provenance["versions"]
    mix = ", ".join(f"{n} {name}" for name, n in Counter(results.prompts).items())
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
    for concurrency in results.loads(TEMPERATURE):
        for name in results.kinds:
            at = (name, TEMPERATURE, concurrency)
            if (speed := results.speed(*at)) is None:
                found.add_row(str(concurrency), name, "failed", *["-"] * 6)
                continue
            ratio = results.ratio(name, results.baseline, TEMPERATURE, concurrency)
            tau, gamma = results.acceptance(*at) or (None, None)
            cells = results.of(*at)
            differing = {one.cell for one in results.outputs if one.prompts}
            found.add_row(
                str(concurrency),
                name,
                f"{speed.value:.0f}",
                f"{ratio.value:.2f}" if ratio else "-",
                f"{tau.value:.2f}" if tau else "-",
                f"{gamma.value:.2f}" if gamma else "-",
                f"{cells.target_rows.sum():.0f}",
                f"{cells.draft_forwards.sum():.0f}",
                "-" if not ratio else "NO" if differing & set(cells.key) else "yes",
            )
    return found


def draft_share(results: Results) -> str:
    """Cost of a draft layer relative to the target's forward, as planners measured it."""
    shares = []
    for cell in results.cells.sort_values("key").itertuples():
        if cell.planner:
            cost = StepCost()
            cost.restore(cell.planner["cost_ms"])
            layer, target = (float(f(cell.concurrency)) for f in (cost.layer, cost.verify))
            shares.append(
                f"{cell.concurrency} at once {layer / target:.0%} ({layer:.1f} of {target:.1f} ms)"
            )
    return (
        "A draft layer beside a target forward of as many rows, as the planner measured them: "
        f"{', '.join(shares) or 'nothing measured'}. Beside an 8B target it is 4 to 8 %."
    )


if __name__ == "__main__":
    sys.exit(main())

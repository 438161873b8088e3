"""The Markdown tables of a throughput run.

python -m eval.gpu.report runs/gpu/h100.jsonl --ceilings runs/gpu/ceilings.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.gpu.methods import BASELINE
from eval.gpu.models import SHAPES
from eval.gpu.roofline import Ceilings, step_floor
from eval.gpu.throughput import read
from eval.tables.markdown import bold, row, rule

ABSENT = "-"


@dataclass(frozen=True)
class Cell:
    """One method at one batch size."""

    method: str
    batch: int
    num_steps: int
    windows: list[list[float]]
    """[seconds, tokens, steps, rows] each."""

    accept_length: float | None
    as_predicted: list[int] | None

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each window."""
        return [tokens / seconds for seconds, tokens, *_ in self.windows]

    @property
    def rate(self) -> float:
        """Their median."""
        return statistics.median(self.rates)

    @property
    def step_ms(self) -> float:
        """Median over windows of the mean step."""
        return statistics.median(1e3 * w[0] / w[2] for w in self.windows)

    @property
    def rows_per_step(self) -> float:
        """Rows the target was asked for."""
        return sum(w[3] for w in self.windows) / sum(w[2] for w in self.windows)

    @property
    def tokens_per_step(self) -> float:
        """Output tokens of the whole batch."""
        return sum(w[1] for w in self.windows) / sum(w[2] for w in self.windows)


class Table:
    """Cells by method and batch, in the order of their first appearance."""

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self.cells: dict[tuple[str, int], Cell] = {}
        self.errors: dict[tuple[str, int], str] = {}
        methods: dict[str, None] = {}
        for line in lines:
            key = line["method"], line["batch"]
            methods[line["method"]] = None
            if "error" in line:
                self.errors[key] = line["error"]
            else:
                self.cells[key] = Cell(**line)
                self.errors.pop(key, None)
        # Fixed lengths were measured in order of interest; people read them in order of length.
        lengths = sorted(name for name in methods if _is_fixed(name))
        others = [name for name in methods if not _is_fixed(name) and name != BASELINE]
        self.methods = [name for name in (BASELINE,) if name in methods] + lengths + others
        self.batches = sorted({line["batch"] for line in lines})

    def best_fixed(self, batch: int) -> float | None:
        """Tokens per second of the best fixed length that was measured."""
        rates = [cell.rate for (name, b), cell in self.cells.items() if b == batch
                 and _is_fixed(name)]  # fmt: skip
        return max(rates, default=None)

    def baseline(self, batch: int) -> float | None:
        """Tokens per second without speculation."""
        cell = self.cells.get((BASELINE, batch))
        return None if cell is None else cell.rate

    def rows(self, text: Callable[[Cell], str]) -> list[str]:
        """One line per method."""
        return [row("method", [f"batch {batch}" for batch in self.batches]),
                rule(len(self.batches)),
                *(row(name, [self._text(name, batch, text) for batch in self.batches])
                  for name in self.methods)]  # fmt: skip

    def _text(self, name: str, batch: int, text: Callable[[Cell], str]) -> str:
        if (name, batch) in self.errors:
            return "failed"
        cell = self.cells.get((name, batch))
        return ABSENT if cell is None else text(cell)


def _is_fixed(name: str) -> bool:
    return name.startswith("fixed ") and "," not in name


def report(
    conditions: dict[str, Any], lines: Sequence[dict[str, Any]], ceilings: Ceilings | None, *,
    command: str = "",
) -> str:  # fmt: skip
    """The whole text."""
    table = Table(lines)
    best = {
        batch: max(cell.rate for (_, b), cell in table.cells.items() if b == batch)
        for batch in table.batches
        if any(b == batch for _, b in table.cells)
    }

    def rate(cell: Cell) -> str:
        spread = f"{cell.rate:.0f} [{min(cell.rates):.0f}, {max(cell.rates):.0f}]"
        return bold(spread, cell.rate >= best[cell.batch])

    def to_baseline(cell: Cell) -> str:
        return ABSENT if (base := table.baseline(cell.batch)) is None else f"{cell.rate / base:.2f}"

    def to_fixed(cell: Cell) -> str:
        return ABSENT if (top := table.best_fixed(cell.batch)) is None else f"{cell.rate / top:.2f}"

    text = [
        "# Decode throughput",
        "",
        *_conditions(conditions, command),
        "",
        "## Output tokens per second",
        "",
        "Median of the windows, in brackets the slowest and the fastest; the best is bold.",
        "",
        *table.rows(rate),
        "",
        "## Ratio to no speculation",
        "",
        *table.rows(to_baseline),
        "",
        "## Ratio to the best fixed length",
        "",
        "The best at that batch size, of those measured: a choice nobody can make beforehand.",
        "",
        *table.rows(to_fixed),
        "",
        *_roofline(conditions, table, ceilings),
        *_checks(table),
    ]
    return "\n".join(text).rstrip() + "\n"


def _conditions(conditions: dict[str, Any], command: str) -> list[str]:
    made = conditions["traces"]
    groups = ", ".join(f"{name} {n}" for name, n in made["groups"].items())
    origin = made["origins"][0]
    versions = ", ".join(f"{name} {number}" for name, number in conditions["versions"].items())
    flags = " ".join(conditions["server_flags"]) or "none"
    return [
        "**Acceptance and confidences are replayed from recorded traces; weights are random.** "
        "Every kernel, graph and copy is real, the text is not.",
        "",
        f"- machine: {conditions['gpu']}; {conditions['host']}",
        f"- versions: {versions}; this code: {conditions['revision']}",
        f"- model: shape {conditions['shape']} in bfloat16 with an EAGLE-3 head, random weights",
        f"- traces: {made['num_traces']} answers, {made['num_roots']} tokens, drafted "
        f"{made['depth']} deep by {origin['algorithm']} of the demo models ({groups}); sha256 "
        f"{made['sha256']}",
        f"- requests: prompts of {conditions['prompt_len']} tokens, {conditions['output_len']} "
        f"generated, temperature {conditions['temperature']}, all of a batch at once, no shared "
        "prefixes",
        f"- n: {conditions['windows']} windows, each over the same traces, at least "
        f"{conditions['min_lanes']}; only steps in which the whole batch decodes",
        f"- gated methods draft {conditions['gated_steps']} tokens and share one server; "
        f"thresholds are their defaults; further server flags: {flags}",
        *([f"- command: `{command}`"] if command else []),
    ]


def _roofline(conditions: dict[str, Any], table: Table, ceilings: Ceilings | None) -> list[str]:
    shape = SHAPES[conditions["shape"]]
    context = conditions["prompt_len"] + conditions["output_len"] / 2
    lines = ["## Where a step's time goes", ""]
    if ceilings is None:
        lines += ["No ceilings were given, so there are no floors.", ""]
    else:
        lines += [
            f"Floor: the bytes and operations of target and draft forwards (about {context:.0f} "
            f"tokens of context) at {ceilings.bytes_per_s / 1e12:.2f} TB/s and "
            f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s, both measured on {ceilings.gpu}. "
            "Gated methods are charged for drafts of full depth.",
            "",
        ]
    names = ["rows", "tokens", "ms", "us per row", "floor, ms", "of it draft", "time / floor"]
    for batch in table.batches:
        lines += [f"Batch {batch}, per step:", "", row("method", names), rule(len(names))]
        for name in table.methods:
            cell = table.cells.get((name, batch))
            if cell is None:
                continue
            rows = cell.rows_per_step
            texts = [f"{rows:.1f}", f"{cell.tokens_per_step:.1f}", f"{cell.step_ms:.2f}",
                     f"{1e3 * cell.step_ms / rows:.1f}"]  # fmt: skip
            # How deep SGLang's adaptive rule drafted is not known.
            if ceilings is not None and (cell.num_steps == 0 or cell.as_predicted is not None):
                floor = step_floor(shape, ceilings, rows=rows, batch=batch, context=context,
                                   num_steps=cell.num_steps)  # fmt: skip
                texts += [f"{1e3 * floor.total:.2f}", f"{1e3 * floor.draft:.2f}",
                          f"{cell.step_ms / (1e3 * floor.total):.2f}"]  # fmt: skip
            lines.append(row(name, texts + [ABSENT] * (len(names) - len(texts))))
        lines.append("")
    return lines


def _checks(table: Table) -> list[str]:
    """Whether requests took the steps that their traces say."""
    lines = [
        "## Checks",
        "",
        "Requests that took as many verifications as their traces say; up to a quarter more where "
        "a gated server may draft fewer layers than its policy would verify.",
        "",
    ]
    right = total = 0
    for (name, batch), cell in table.cells.items():
        if cell.as_predicted is None:
            continue
        right, total = right + cell.as_predicted[0], total + cell.as_predicted[1]
        if cell.as_predicted[0] != cell.as_predicted[1]:
            lines.append(f"- {name}, batch {batch}: only {cell.as_predicted[0]} of "
                         f"{cell.as_predicted[1]}")  # fmt: skip
    lines.append(f"- in all: {right} of {total}")
    for (name, batch), error in table.errors.items():
        lines.append(f"- {name}, batch {batch} failed: {error.strip().splitlines()[0][:200]}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the report."""
    parser = argparse.ArgumentParser(prog="python -m eval.gpu.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--ceilings", type=Path, help="from python -m eval.gpu.roofline --out")
    parser.add_argument("--command", default="", help="that made the results, for the record")
    parser.add_argument("--out", type=Path, help="Markdown file; default: print")
    args = parser.parse_args(argv)
    try:
        conditions, lines = read(args.results)
        ceilings = Ceilings.read(args.ceilings) if args.ceilings else None
    except (OSError, ValueError, TypeError) as error:
        print(f"eval.gpu.report: error: {error}", file=sys.stderr)
        return 2
    text = report(conditions, lines, ceilings, command=args.command)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

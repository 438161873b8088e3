"""Checks of a run: outputs equal those without speculation, metrics equal the requests' counts.

Pure functions of recorded cells; ``eval.run`` stores their findings in DIR/checks.json.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.bench.records import Cell, CellKey, Run
from sglang_c2t.offline.client import differing


@dataclass(frozen=True)
class Comparison:
    """A cell whose outputs were compared with the baseline's, and the prompts that differ."""

    cell: CellKey
    compared: int
    prompts: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.cell}: {len(self.prompts)} of {self.compared} outputs differ from the "
            f"baseline's, first at prompt {self.prompts[0]}"
            if self.prompts
            else f"{self.cell}: {self.compared} outputs equal the baseline's"
        )


def compare_outputs(
    cells: Sequence[Cell], baseline: str, *, seeded: bool = False, fresh: bool = False
) -> list[Comparison]:
    """Compare each cell's outputs with the baseline's at the same concurrency.

    Greedy cells, later repeats of the baseline included, are compared with the baseline's first
    repeat. ``seeded`` adds sampled cells, each compared with the baseline's cell of the same
    repeat, which has the same seeds. ``fresh`` compares greedy cells by repeat too, because each
    repeat has its own prompts.
    """

    def group(cell: Cell) -> tuple[float, int, int]:
        by_repeat = fresh or cell.temperature > 0
        return cell.temperature, cell.concurrency, cell.repeat if by_repeat else 0

    reference: dict[tuple[float, int, int], Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.repeat):
        if cell.method == baseline:
            reference.setdefault(group(cell), cell)
    found = []
    for cell in cells:
        expected = reference.get(group(cell))
        if expected is None or expected is cell or (cell.temperature > 0 and not seeded):
            continue
        places = differing(cell.outputs, expected.outputs)
        wrong = tuple(cell.requests[place].index for place in places)
        found.append(Comparison(cell.key, len(cell.requests), wrong))
    return found


def compare_run_outputs(cells: Sequence[Cell], run: Run) -> list[Comparison]:
    """:func:`compare_outputs` as the run's ``requests.equal_outputs`` asks for it."""
    requests = run.config.get("requests", {})
    wanted = requests.get("equal_outputs")
    if wanted == "none":
        return []
    baseline = next((method.name for method in run.methods if method.baseline), "")
    fresh = requests.get("fresh_prompts", False)
    return compare_outputs(cells, baseline, seeded=wanted == "seeded", fresh=fresh)


def metric_disagreements(cell: Cell) -> list[str]:
    """One sentence for each series of ``/metrics`` that differs from the requests' sums."""
    series: dict[str, float] = defaultdict(float)  # summed over labels
    for name, value in cell.metrics.items():
        series[name.split("{", 1)[0]] += value
    totals, lengths = cell.totals, _proposed_lengths(cell)
    expected: dict[str, float] = {
        "c2t:verifications_total": totals.verify_ct,
        "c2t:proposed_drafts_total": totals.num_proposed_drafts,
        "c2t:correct_drafts_total": totals.num_correct_drafts,
        "c2t:proposed_length_count": sum(lengths),
        "c2t:proposed_length_sum": sum(length * times for length, times in enumerate(lengths)),
    }
    grown = {name: series[name] for name in expected}
    cumulative = [*itertools.accumulate(lengths)] or [0]
    for name, value in cell.metrics.items():
        if bound := re.match(r"c2t:proposed_length_bucket.*\ble='([^']+)'", name):
            grown[name] = value
            expected[name] = cumulative[int(min(float(bound[1]), len(cumulative) - 1))]
    found = [
        f"{cell.key}: {name} grew by {grown[name]:g}, the requests say {value:g}"
        for name, value in expected.items()
        if grown[name] != value
    ]
    # With overlap, a request that ends is verified once more: this adds rows, but no count.
    rows, least = series["c2t:verify_rows_total"], totals.num_proposed_drafts + totals.verify_ct
    if rows < least:
        found.append(f"{cell.key}: c2t:verify_rows_total grew by {rows:g}, less than {least:g}")
    return found


def _proposed_lengths(cell: Cell) -> list[int]:
    """Number of verifications by number of proposed drafts.

    SGLang's histogram counts rows, one of which is the root.
    """
    histograms: Iterable[list[int]] = (
        request.meta.get("spec_cap_lens_histogram", [])[1:] for request in cell.requests
    )
    return [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]

"""What a run must show of itself: outputs as without speculation, and books that agree.

Pure functions of recorded cells; ``eval.run`` stores their findings in DIR/checks.json.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.bench.records import Cell, CellKey, Run
from sglang_c2t.offline.client import differing


@dataclass(frozen=True)
class Difference:
    """A cell with other outputs than the baseline had for the same prompts."""

    cell: CellKey
    prompts: list[int]
    compared: int

    def __str__(self) -> str:
        return (
            f"{self.cell}: {len(self.prompts)} of {self.compared} outputs differ from the "
            f"baseline's, first at prompt {self.prompts[0]}"
        )


def output_differences(
    cells: Iterable[Cell], baseline: str, *, seeded: bool = False, fresh: bool = False
) -> tuple[list[Difference], int]:
    """Cells whose outputs differ from the baseline's, and how many outputs were compared.

    Greedy cells are compared with the baseline's first repeat at the same concurrency, its own
    later repeats included. ``seeded`` compares sampled cells too, each with the baseline's cell
    of the same repeat, which drew with the same seeds. With ``fresh`` prompts greedy ones are
    compared so, too.
    """
    cells = list(cells)

    def rung(cell: Cell) -> tuple[float, int, int]:
        """Cells of one must give the same outputs."""
        own = fresh or cell.temperature > 0
        return cell.temperature, cell.concurrency, cell.repeat if own else 0

    reference: dict[tuple[float, int, int], Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.repeat):
        if cell.method == baseline:
            reference.setdefault(rung(cell), cell)
    found, compared = [], 0
    for cell in cells:
        expected = reference.get(rung(cell))
        if expected is None or expected is cell or (cell.temperature > 0 and not seeded):
            continue
        places = differing(cell.outputs, expected.outputs)
        wrong = [cell.requests[place].index for place in places]
        compared += len(cell.requests)
        if wrong:
            found.append(Difference(cell.key, wrong, len(cell.requests)))
    return found, compared


def compared_outputs(cells: Iterable[Cell], run: Run) -> tuple[list[Difference], int]:
    """The same as the run's configuration asks for it."""
    requests = run.config.get("requests", {})
    wanted = requests.get("equal_outputs")
    if wanted == "none":
        return [], 0
    baseline = next((method.name for method in run.methods if method.baseline), "")
    return output_differences(
        cells, baseline, seeded=wanted == "seeded", fresh=requests.get("fresh_prompts", False)
    )


def metric_disagreements(cell: Cell) -> list[str]:
    """One sentence for each series of ``/metrics`` that is not what the requests sum up to."""
    series = _by_name(cell.metrics)
    totals = cell.totals
    lengths = _proposed_lengths(cell)
    expected: dict[str, float] = {
        "c2t:verifications_total": totals.verify_ct,
        "c2t:proposed_drafts_total": totals.num_proposed_drafts,
        "c2t:correct_drafts_total": totals.num_correct_drafts,
        "c2t:proposed_length_count": sum(lengths),
        "c2t:proposed_length_sum": sum(length * times for length, times in enumerate(lengths)),
    }
    found = [
        f"{cell.key}: {name} grew by {series.get(name, 0.0):g}, the requests say {value:g}"
        for name, value in expected.items()
        if series.get(name, 0.0) != value
    ]
    # With overlap, a request that ends is verified once more for nothing: rows, but no count.
    rows = series.get("c2t:verify_rows_total", 0.0)
    least = totals.num_proposed_drafts + totals.verify_ct
    if rows < least:
        found.append(f"{cell.key}: c2t:verify_rows_total grew by {rows:g}, less than {least:g}")
    return found + _bucket_disagreements(cell, lengths)


def _bucket_disagreements(cell: Cell, lengths: Sequence[int]) -> list[str]:
    cumulative = list(itertools.accumulate(lengths))
    found = []
    for name, value in cell.metrics.items():
        if not name.startswith("c2t:proposed_length_bucket"):
            continue
        bound = float(name.split("le='", 1)[1].split("'", 1)[0])
        at = min(bound, len(cumulative) - 1)
        expected = cumulative[int(at)] if cumulative else 0
        if value != expected:
            found.append(f"{cell.key}: {name} grew by {value:g}, the requests say {expected:g}")
    return found


def _by_name(metrics: dict[str, float]) -> dict[str, float]:
    """Sums over labels."""
    sums: dict[str, float] = defaultdict(float)
    for series, value in metrics.items():
        sums[series.split("{", 1)[0]] += value
    return sums


def _proposed_lengths(cell: Cell) -> list[int]:
    """Verifications by number of drafts verified: entry 2 counts those of two drafts.

    SGLang's histogram counts rows, and every verification has the root's.
    """
    counts: list[int] = []
    for request in cell.requests:
        histogram = request.meta.get("spec_cap_lens_histogram", [])[1:]
        counts += [0] * (len(histogram) - len(counts))
        for length, times in enumerate(histogram):
            counts[length] += times
    return counts

"""The numbers of a run: its records, reduced cell by cell to what the report tells.

Token ids and times of single requests are dropped once they are compared and summed, so that
a long run fits into memory.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from eval.bench.checks import Difference, compared_outputs, metric_disagreements
from eval.bench.config import named
from eval.bench.records import (
    CELLS,
    Cell,
    CellKey,
    Method,
    RecordError,
    Request,
    Run,
    read_cell,
    read_cells,
    read_run,
)
from eval.gpu.models import SHAPES
from eval.report.intervals import Acceptance, Counts, Estimate, Noise, Ratio, acceptance
from sglang_c2t.offline.compare import Array

#: Of SGLang's counts per request: index is accepted drafts, and verified rows, root included.
#: The first has changed its name between releases.
ACCEPT_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_num_correct_drafts_histogram")
DRAFT_HISTOGRAM = "spec_cap_lens_histogram"

#: SGLang tells the drafts of its adaptive method as if each had the length of the flags.
UNTOLD_DRAFTS = frozenset({"adaptive"})
CONSTANT_DRAFTS = frozenset({"fixed", "tree"})
#: What anybody can set without C2T: none, or one length for all requests.
STATIC = frozenset({"none", "fixed"})

#: Cells in which requests failed are kept apart, in this folder of the run.
FAILED = "failed"


@dataclass
class Compared:
    """Outputs of a method beside those without speculation."""

    compared: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Measured(Cell):
    """One cell whose ``requests`` are gone, and what is kept of them."""

    num_requests: int
    errors: tuple[str, ...]  # of failed requests
    spec: dict[int, tuple[str, int, int, int]]  # prompt: family, verify_ct, correct, proposed
    accept_lengths: Counter[int]  # tokens per verification: number of verifications
    proposed_lengths: Counter[int]  # drafts verified: number of verifications
    latency_s: Array
    ttft_s: Array
    per_token_s: Array
    prompt_tokens: float  # of a request, on average
    disagreements: tuple[str, ...] | None  # with the server's metrics; None where it has none

    @property
    def answered(self) -> bool:
        """Whether any request succeeded."""
        return self.tokens_per_second > 0


def measured(cell: Cell) -> Measured:
    """Reduce a cell."""
    answered = [request for request in cell.requests if request.success]
    # An answer that came in one piece tells nothing of its first token.
    streamed = [r for r in answered if r.output_len == 1 or r.latency_s > r.ttft_s]
    return Measured(
        **{**vars(cell), "requests": ()},
        num_requests=len(cell.requests),
        errors=tuple(request.error for request in cell.requests if not request.success),
        spec={request.index: _spec(request) for request in answered},
        accept_lengths=_histogram(answered, ACCEPT_HISTOGRAMS, shift=1),
        proposed_lengths=_histogram(answered, (DRAFT_HISTOGRAM,), shift=-1),
        latency_s=np.array([request.latency_s for request in answered]),
        ttft_s=np.array([request.ttft_s for request in streamed]),
        per_token_s=np.array(
            [
                (request.latency_s - request.ttft_s) / (request.output_len - 1)
                for request in streamed
                if request.output_len > 1
            ]
        ),
        prompt_tokens=sum(r.prompt_len for r in answered) / max(len(answered), 1),
        disagreements=tuple(metric_disagreements(cell)) if cell.metrics else None,
    )


def _spec(request: Request) -> tuple[str, int, int, int]:
    meta = request.meta
    names = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    verify_ct, correct, proposed = (meta.get(name, 0) for name in names)
    return request.family, verify_ct, correct, proposed


def _histogram(requests: Iterable[Request], keys: Sequence[str], shift: int) -> Counter[int]:
    total: Counter[int] = Counter()
    for request in requests:
        counts = next(filter(None, map(request.meta.get, keys)), ())
        total.update({i + shift: count for i, count in enumerate(counts) if count})
    return total


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a method at one temperature and concurrency."""

    repeats: dict[int, float]
    num_failed: int  # requests

    @property
    def mean(self) -> float:
        """Geometric mean over repeats, as ratios are taken."""
        return statistics.geometric_mean(self.repeats.values())

    @property
    def spread(self) -> Estimate:
        """The mean, the slowest and the fastest repeat."""
        values = self.repeats.values()
        if len(values) < 2:
            return Estimate(self.mean)
        return Estimate(self.mean, min(values), max(values))


Rate = Callable[[Measured], float | None]


def whole(cell: Measured) -> float | None:
    """Tokens per second from the first request sent to the last answer read."""
    return cell.tokens_per_second if cell.answered else None


def steady(cell: Measured) -> float | None:
    """Tokens per second while as many requests as asked for are at work, as SGLang finds them."""
    rate = (cell.steady or {}).get("output_throughput")
    return rate if rate and rate > 0 else None


def promptness(cell: Measured) -> float | None:
    """One over the mean seconds of a request, queueing included, so that more is better."""
    return 1 / float(cell.latency_s.mean()) if cell.answered else None


@dataclass(frozen=True)
class Results:
    """All cells of a run, and what is asked of them."""

    run: Run
    cells: dict[CellKey, Measured]
    outputs: dict[str, Compared] = field(default_factory=dict)  # by method
    problems: list[str] = field(default_factory=list)  # files and cells that failed

    @property
    def methods(self) -> list[Method]:
        """The baseline first, then as configured."""
        return sorted(self.run.methods, key=lambda method: not method.baseline)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [method.name for method in self.methods]

    @property
    def baseline(self) -> str | None:
        """The method without speculation."""
        return next((method.name for method in self.methods if method.baseline), None)

    @property
    def pair(self) -> tuple[str, str]:
        """Trained pair and shape of ``eval.gpu.models``, empty where the run has none."""
        pair, size = named(str((self.run.config.get("model") or {}).get("target", "")))
        return pair, size if size in SHAPES else ""

    @cached_property
    def temperatures(self) -> list[float]:
        """Those measured."""
        return sorted({key.temperature for key in self.cells})

    def concurrencies(self, temperature: float) -> list[int]:
        """Those measured at this temperature."""
        return sorted({key.concurrency for key in self.cells if key.temperature == temperature})

    @cached_property
    def repeats(self) -> list[int]:
        """Numbers of those measured."""
        return sorted({key.repeat for key in self.cells})

    @cached_property
    def families(self) -> list[str]:
        """Of the prompts, in the order of the data set."""
        named = [part["family"] for part in self.run.dataset.get("parts", ())]
        seen = (spec[0] for cell in self.cells.values() for spec in cell.spec.values())
        return list(dict.fromkeys((*named, *seen)))

    def kind(self, name: str) -> str:
        """What kind of method it is."""
        return next(method.kind for method in self.methods if method.name == name)

    @cached_property
    def _by_method(self) -> dict[tuple[str, float], list[Measured]]:
        found: dict[tuple[str, float], list[Measured]] = {}
        for key in sorted(self.cells):
            found.setdefault((key.method, key.temperature), []).append(self.cells[key])
        return found

    def of(self, method: str, temperature: float, concurrency: int | None = None) -> list[Measured]:
        """Its cells at all concurrencies, or at one."""
        cells = self._by_method.get((method, temperature), [])
        return [cell for cell in cells if concurrency in (None, cell.key.concurrency)]

    def speed(
        self, method: str, temperature: float, concurrency: int, rate: Rate = whole
    ) -> Speed | None:
        """None where no request was answered."""
        cells = self.of(method, temperature, concurrency)
        rates = {cell.key.repeat: rate(cell) for cell in cells}
        known = {repeat: value for repeat, value in rates.items() if value}
        failed = sum(len(cell.errors) for cell in cells)
        return Speed(known, failed) if known else None

    def ratio(
        self, method: str, other: str, temperature: float, concurrency: int, rate: Rate = whole
    ) -> Ratio | None:
        """Of their speeds, paired by repeat; None where no repeat has both."""
        return self._paired(method, other, self._logs(temperature, concurrency, rate))

    def best_static(self, temperature: float, concurrency: int, rate: Rate = whole) -> str | None:
        """The fastest here of no speculation and the fixed lengths; None where none answered."""
        static = [name for name in self.names if self.kind(name) in STATIC]
        return self.fastest(static, temperature, concurrency, rate)

    def fastest(
        self, names: Iterable[str], temperature: float, concurrency: int, rate: Rate = whole
    ) -> str | None:
        """Of ``names`` here; None where none answered."""
        speeds = {
            name: speed.mean
            for name in names
            if (speed := self.speed(name, temperature, concurrency, rate)) is not None
        }
        return max(speeds, key=speeds.__getitem__, default=None)

    def phases(self, temperature: float) -> list[dict[str, Any]]:
        """Of the ramp at this temperature, ``prompts`` and ``rate`` of each; none of a ladder."""
        loads = self.run.config.get("load", ())
        return next(
            (load.get("phases", []) for load in loads if load["temperature"] == temperature), []
        )

    def overall_ratio(self, method: str, other: str, temperature: float) -> Ratio | None:
        """Over all concurrencies alike; repeats that lack one of them do not count."""
        rungs = [self._logs(temperature, c, whole) for c in self.concurrencies(temperature)]
        means = {
            name: {
                repeat: statistics.fmean(rung[name][repeat] for rung in rungs)
                for repeat in self.repeats
                if all(repeat in rung[name] for rung in rungs)
            }
            for name in self.names
        }
        return self._paired(method, other, means)

    def _logs(
        self, temperature: float, concurrency: int, rate: Rate
    ) -> dict[str, dict[int, float]]:
        """Logarithms of the speeds of all methods, by repeat."""
        speeds = {name: self.speed(name, temperature, concurrency, rate) for name in self.names}
        return {
            name: {} if speed is None else {r: math.log(v) for r, v in speed.repeats.items()}
            for name, speed in speeds.items()
        }

    def _paired(self, method: str, other: str, logs: dict[str, dict[int, float]]) -> Ratio | None:
        return Ratio.paired(logs[method], logs[other], Noise.of(logs))

    @cached_property
    def prompts(self) -> dict[int, str]:
        """Family of every prompt that was answered, by its number."""
        found = {i: spec[0] for cell in self.cells.values() for i, spec in cell.spec.items()}
        return dict(sorted(found.items()))

    def counts(self, cells: Iterable[Measured]) -> Counts | None:
        """Summed per prompt over ``cells``; prompts that none of them answered count nothing."""
        families = tuple(self.prompts.values())
        each = [
            np.array([cell.spec.get(i, ("", 0, 0, 0))[1:] for i in self.prompts], dtype=float)
            for cell in cells
        ]
        if not each:
            return None
        return reduce(add, (Counts(families, *array.T) for array in each))

    def acceptance(
        self,
        method: str,
        temperature: float,
        concurrency: int | None = None,
        family: str | None = None,
    ) -> Acceptance | None:
        """Accept length tau and gamma; None where nothing was verified."""
        cells = self.of(method, temperature, concurrency)
        counts = self.counts(cells)
        if counts is None:
            return None
        if family is not None:
            counts = counts.of_family(family)
        found = acceptance(counts)
        if found is None or self.kind(method) not in UNTOLD_DRAFTS:
            return found
        return Acceptance(found.tau, self._counted_gamma(cells) if family is None else None)

    def _counted_gamma(self, cells: Sequence[Measured]) -> Estimate | None:
        """From rows that the target's forwards counted, roots taken away; without interval."""
        verified = sum(spec[1] for cell in cells for spec in cell.spec.values())
        if not verified or not all("verify_rows" in cell.work for cell in cells):
            return None
        return Estimate(sum(cell.work["verify_rows"] for cell in cells) / verified - 1)

    def per_token(
        self, counters: Sequence[str], method: str, temperature: float, concurrency: int | None
    ) -> float | None:
        """What the plugin counted, per output token; None without its counters."""
        cells = self.of(method, temperature, concurrency)
        tokens = sum(cell.output_tokens for cell in cells)
        if not tokens or not all(name in cell.work for cell in cells for name in counters):
            return None
        return sum(cell.work[name] for cell in cells for name in counters) / tokens

    def accept_lengths(self, method: str, temperature: float) -> Counter[int]:
        """Verifications by tokens gained; empty where the server told no histogram."""
        return _total(cell.accept_lengths for cell in self.of(method, temperature))

    def proposed_lengths(self, method: str, temperature: float) -> Counter[int]:
        """Verifications by drafts verified; empty where neither told nor known to be constant."""
        told = _total(cell.proposed_lengths for cell in self.of(method, temperature))
        if told or self.kind(method) not in CONSTANT_DRAFTS:
            return told
        counts = self.counts(self.of(method, temperature))
        if counts is None or not (verified := counts.verify_ct.sum()):
            return told
        return Counter({round(counts.proposed.sum() / verified): int(verified)})


def _total(counters: Iterable[Counter[int]]) -> Counter[int]:
    return reduce(add, counters, Counter[int]())


Progress = Callable[[Sequence[list[Path]]], Iterable[list[Path]]]


def load(folder: Path, progress: Progress = iter) -> Results:
    """Read a run; :class:`RecordError` where there is none or nothing was measured."""
    results = Results(read_run(folder), {})
    for paths in progress(_rungs(folder / CELLS)):
        _add_rung(results, paths)
    for cell in read_cells(folder / FAILED)[0]:
        if cell.key not in results.cells:
            failed = [request for request in cell.requests if not request.success]
            results.problems.append(
                f"{cell.key}: failed and not measured again; {len(failed)} of "
                f"{len(cell.requests)} requests failed, the first with: {_first(failed)}"
            )
    if not results.cells:
        reasons = "".join(f"\n  {problem}" for problem in results.problems)
        raise RecordError(f"{folder} holds no measured cell: run python -m eval.run first{reasons}")
    return results


def _first(failed: Sequence[Request]) -> str:
    lines = failed[0].error.strip().splitlines() if failed else []
    return lines[0][:200] if lines else "no word"


def _rungs(folder: Path) -> list[list[Path]]:
    """Files of cells, those of one temperature and concurrency together."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if not path.name.startswith("."):  # those are being written
            rung = re.search(r"\.(t[^.]*(?:\.\d+)?\.c\d+)\.r\d+\.jsonl$", path.name)
            groups.setdefault(rung[1] if rung else "", []).append(path)
    return list(groups.values())


def _add_rung(results: Results, paths: Sequence[Path]) -> None:
    """Outputs are compared within a rung, so only one rung's are in memory at a time."""
    cells = []
    for path in paths:
        try:
            cell = read_cell(path)
        except RecordError as error:
            results.problems.append(str(error))
            continue
        if cell.method in results.names:
            cells.append(cell)
        else:
            results.problems.append(f"{path}: method {cell.method!r} is not in run.json; left out")
    results.cells.update((cell.key, measured(cell)) for cell in cells)
    _compare_outputs(results, cells)


def _compare_outputs(results: Results, cells: Sequence[Cell]) -> None:
    """What the run's own check finds, method by method."""
    base = results.baseline
    if base is None:
        return
    ours = [cell for cell in cells if cell.method == base]
    _, among_ours = compared_outputs(ours, results.run)
    for name in results.names:
        theirs = [cell for cell in cells if cell.method == name and name != base]
        found, compared = compared_outputs([*ours, *theirs], results.run)
        entry = results.outputs.setdefault(name, Compared())
        entry.compared += compared if name == base else compared - among_ours
        entry.differences += [one for one in found if one.cell.method == name]

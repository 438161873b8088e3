"""Tables of a run: one row per measured cell, one row per request, without token ids."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.bench.checks import Comparison, compare_run_outputs, metric_disagreements
from eval.bench.records import Cell, CellKey, RecordError, Request, Run, read_cells, read_run
from eval.report.intervals import Estimate, paired_ratio, tau_gamma
from sglang_c2t.offline.client import full_load_rate

#: SGLang reports an adaptive method's drafts as if all had the length of its flags.
UNKNOWN_DRAFTS = frozenset({"adaptive"})
#: What a user can set without C2T: no speculation, or one length for all requests.
STATIC = frozenset({"none", "fixed"})
#: Folder of cells in which requests failed.
FAILED = "failed"


@dataclass(eq=False)
class Results:
    """A run's tables; method, temperature, concurrency and repeat are columns of both."""

    run: Run
    cells: pd.DataFrame
    requests: pd.DataFrame
    outputs: list[Comparison]
    problems: list[str]  # files and cells that cannot be used

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Kind of each method, the baseline first, then as configured."""
        methods = sorted(self.run.methods, key=lambda method: not method.baseline)
        return {method.name: method.kind for method in methods}

    @cached_property
    def baseline(self) -> str | None:
        """Name of the method without speculation."""
        return next((method.name for method in self.run.methods if method.baseline), None)

    @cached_property
    def temperatures(self) -> list[float]:
        """Temperatures measured."""
        return sorted(self.cells.temperature.unique())

    @cached_property
    def prompts(self) -> pd.Series[str]:
        """Family of every prompt that was answered, by its number."""
        return self.requests[self.requests.success].groupby("index").family.last()

    def loads(self, temperature: float) -> list[int]:
        """Concurrencies measured at this temperature."""
        return sorted(self.cells[self.cells.temperature == temperature].concurrency.unique())

    def of(
        self, method: str, temperature: float, load: int | None = None, *, answers: bool = False
    ) -> pd.DataFrame:
        """The method's cells, or its answered requests, at one concurrency or at all."""
        table = self.requests[self.requests.success] if answers else self.cells
        chosen = (table.method == method) & (table.temperature == temperature)
        return table[chosen if load is None else chosen & (table.concurrency == load)]

    # -- speed ------------------------------------------------------------------------------

    @cached_property
    def _logs(self) -> dict[tuple[float, int, str], pd.DataFrame]:
        """Log rate, repeats by methods, for each temperature, concurrency and kind of rate."""
        loads = self.cells.groupby(["temperature", "concurrency"])
        return {
            (temperature, load, rate): np.log(
                cells.pivot(index="repeat", columns="method", values=rate)
            ).reindex(columns=list(self.kinds))
            for (temperature, load), cells in loads
            for rate in ("speed", "decode", "thrift")
        }

    def speed(self, method: str, temperature: float, load: int) -> Estimate | None:
        """Geometric mean [slowest, fastest repeat]; ``None`` if no request was answered."""
        logs = self._logs[temperature, load, "speed"][method].dropna()
        if logs.empty:
            return None
        ends = (math.exp(logs.min()), math.exp(logs.max())) if len(logs) > 1 else ()
        return Estimate(math.exp(logs.mean()), *ends)

    def ratio(
        self, method: str | None, other: str | None, temperature: float, load: int | None,
        rate: str = "speed",
    ) -> Estimate | None:  # fmt: skip
        """Ratio of two methods' rates within repeats; ``None`` if no repeat has both.

        Without a load: over all of them with equal weight, from repeats that have all.
        """
        if method is None or other is None:
            return None
        loads = self.loads(temperature) if load is None else [load]
        logs = [self._logs[temperature, load, rate] for load in loads]
        return paired_ratio(sum(logs[1:], logs[0]) / len(logs), method, other)

    def fastest(self, names: Iterable[str], temperature: float, load: int) -> str | None:
        """The fastest of ``names`` at this load; ``None`` if none of them answered."""
        means = self._logs[temperature, load, "speed"][list(names)].mean().dropna()
        return str(means.idxmax()) if len(means) else None

    def best_static(self, temperature: float, load: int) -> str | None:
        """The fastest of no speculation and the fixed lengths at this load."""
        static = [name for name, kind in self.kinds.items() if kind in STATIC]
        return self.fastest(static, temperature, load)

    # -- speculation ------------------------------------------------------------------------

    def counts(self, method: str, temperature: float, load: int | None = None) -> pd.DataFrame:
        """Family, verifications, correct and proposed drafts of each prompt of the run."""
        answers = self.of(method, temperature, load, answers=True)
        sums = answers.groupby("index")[["verify", "correct", "proposed"]].sum()
        return self.prompts.to_frame("family").join(sums).fillna(0)

    def acceptance(
        self, method: str, temperature: float, load: int | None = None, family: str = ""
    ) -> tuple[Estimate, Estimate | None] | None:
        """Accept length tau, drafts per verification gamma; ``None`` if nothing was verified.

        An adaptive method's gamma is counted from verified rows, without an interval.
        """
        counts = self.counts(method, temperature, load)
        found = tau_gamma(counts[counts.family == family] if family else counts)
        if found is None or self.kinds[method] not in UNKNOWN_DRAFTS:
            return found
        rows = self.of(method, temperature, load).verify_rows.sum(skipna=False)
        known = not family and not math.isnan(rows)
        return found[0], Estimate(rows / counts.verify.sum() - 1) if known else None

    @property
    def missing(self) -> list[CellKey]:
        """Cells of the configured grid that have no file."""
        config = self.run.config
        return [
            key
            for load in config.get("load", ())
            for concurrency in load["concurrency"]
            for method in self.kinds
            for repeat in range(config.get("repeats", 0))
            if (key := CellKey(method, load["temperature"], concurrency, repeat))
            not in set(self.cells.key)
        ]


def load(folder: Path) -> Results:
    """Read a run; :class:`RecordError` if there is none or nothing was measured."""
    run = read_run(folder)
    every, problems = read_cells(folder)
    known = {method.name for method in run.methods}
    cells = [cell for cell in every if cell.method in known]
    measured = {cell.key for cell in cells}
    problems += [f"{c.key}: not in run.json; left out" for c in every if c.key not in measured]
    problems += [
        f"{cell.key}: failed and not measured again; {_failures(cell)}"
        for cell in read_cells(folder / FAILED)[0]
        if cell.key not in measured
    ]
    if not cells:
        reasons = "".join(f"\n  {problem}" for problem in problems)
        raise RecordError(f"{folder} holds no measured cell: run python -m eval.run first{reasons}")
    requests = [_request_row(cell, request) for cell in cells for request in cell.requests]
    return Results(run, pd.DataFrame(map(_cell_row, cells)), pd.DataFrame(requests),
                   compare_run_outputs(cells, run), problems)  # fmt: skip


def _failures(cell: Cell) -> str:
    """How many requests failed and the first error, or an empty text."""
    failed = [request for request in cell.requests if not request.success]
    if not failed:
        return ""
    first = (failed[0].error.strip().splitlines() or ["no message"])[0][:200]
    return f"{len(failed)} of {len(cell.requests)} requests failed, the first with: {first}"


def _cell_row(cell: Cell) -> dict[str, Any]:
    rows = [cell.work.get(name, math.nan) for name in ("target_decode_rows", "verify_rows")]
    clock = cell.clock
    return {
        "key": cell.key,
        **vars(cell.key),
        "tokens": cell.output_tokens,
        "speed": (_full_load_rate(cell) if clock else cell.tokens_per_second) or math.nan,
        "decode": clock["tokens"] / clock["seconds"] if clock else math.nan,
        "thrift": cell.output_tokens / cell.cpu_seconds if cell.cpu_seconds else math.nan,
        "failures": _failures(cell),
        "draft_forwards": cell.work.get("draft_forwards", math.nan),
        "verify_rows": rows[1],
        "target_rows": sum(rows),
        "clock": clock,
        "argv": cell.server_argv,
        "disagreements": metric_disagreements(cell) if cell.metrics else None,
    }


def _full_load_rate(cell: Cell) -> float:
    spans = [(r.start_s, r.start_s + r.ttft_s, r.start_s + r.latency_s, r.output_len)
             for r in cell.requests if r.success]  # fmt: skip
    return full_load_rate(spans, cell.concurrency) if spans else math.nan


def _request_row(cell: Cell, request: Request) -> dict[str, Any]:
    latency, length = request.latency_s, request.output_len
    # An answer in one piece has no time of its first token.
    streamed = request.success and (length == 1 or latency > request.ttft_s)
    return {
        **vars(cell.key),
        "index": request.index,
        "family": request.family,
        "success": request.success,
        "latency_s": latency,
        "ttft_s": request.ttft_s if streamed else math.nan,
        "per_token_s": (latency - request.ttft_s) / (length - 1)
        if streamed and length > 1 else math.nan,
        "verify": request.meta.get("spec_verify_ct", 0),
        "correct": request.meta.get("spec_num_correct_drafts", 0),
        "proposed": request.meta.get("spec_num_proposed_drafts", 0),
    }  # fmt: skip

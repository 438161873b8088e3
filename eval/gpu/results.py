"""Results of a sprint: JSON lines that are written as they come, and a Markdown report of them."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.tables import markdown

Row = dict[str, Any]

#: How a row of each kind is printed, in the order of the report.
LINES = {
    "about": "{gpu}, {gib} GiB, revision {revision}, {versions}, {hardware}",
    "start": "ready: {server}, {requests} requests, {seconds} s {flags}",
    "died": "DIED {server}, {requests} requests: {cause} {flags}",
    "kernels": "{part}: exit code {code}, {seconds} s, {passed} passed, failed: {failed}",
    "c2t state": "{server}: packed {packed}, {reason}",
    "control": "{server} compared with itself at smaller batches: {parted}/{total} differ",
    "answers": "answers of {server}, {method}, batch {batch}: {parted}/{total} differ, "
    "WRONG: {num_wrong}, tau {tau}",
    "switched": "{server} switched to {policy}: {ok} {error}",
    "cell": "{shape} {method} batch {batch}: {tokens_per_second} tokens/s, tau {tau}, "
    "{ms_per_step} ms and {rows_per_step} rows a step, {parted} of {requests} answers differ",
    "failed": "FAILED {cell}: {error}",
    "error": "ERROR in {stage}: {error}",
    "stage": "stage {name}: {seconds} s {error}",
}

_began = time.time()


def start_clock() -> None:
    """Count from now, or from SPRINT_T0, which ``sprint.sh`` sets before it unpacks."""
    global _began
    _began = float(os.environ.get("SPRINT_T0") or time.time())


def elapsed() -> float:
    """Seconds since the command began."""
    return time.time() - _began


class Results:
    """A folder with ``results.jsonl`` and ``sprint.log``; a killed process leaves its rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: list[Row] = []
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        self._sink = (folder / "results.jsonl").open("a", buffering=1)

    def log(self, text: str) -> None:
        """Print a line, and append it to ``sprint.log``."""
        line = f"[{elapsed():6.1f}] {text}"
        with self._lock, (self.folder / "sprint.log").open("a") as sink:
            print(line, flush=True)
            sink.write(line + "\n")

    def add(self, kind: str, **values: Any) -> None:
        """Keep and print a result; it is on disk when this returns."""
        with self._lock:
            row = {"kind": kind, "t": round(elapsed(), 1), **values}
            self._rows.append(row)
            self._sink.write(json.dumps(row) + "\n")
            os.fsync(self._sink.fileno())
        self.log(LINES[kind].format(**row))

    def rows(self, kind: str) -> list[Row]:
        """All results of a kind."""
        with self._lock:
            return [row for row in self._rows if row["kind"] == kind]


def report(results: Results) -> str:
    """Everything measured so far, as Markdown."""
    parts = list(_speeds(results.rows("cell")))
    parts += [f"- {line.format(**row)}" for kind, line in LINES.items()
              for row in results.rows(kind)]  # fmt: skip
    return "\n".join([f"# Sprint, {elapsed():.0f} s after its start", "", *parts]) + "\n"


def _speeds(cells: Sequence[Row]) -> Iterator[str]:
    """For each model shape, a table of tokens/s by method and batch."""
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        mine = [cell for cell in cells if cell["shape"] == shape]
        batches = sorted({cell["batch"] for cell in mine})
        yield f"## {shape}: decoded tokens/s (ratio to no speculation), median of repeats\n"
        yield markdown.row("method", [str(batch) for batch in batches])
        yield markdown.rule(len(batches))
        for method in dict.fromkeys(cell["method"] for cell in mine):
            yield markdown.row(method, [_speed(mine, method, batch) for batch in batches])
        yield ""


def _speed(cells: Sequence[Row], method: str, batch: int) -> str:
    rates = [
        [c["tokens_per_second"] for c in cells if (c["method"], c["batch"]) == (name, batch)]
        for name in (method, "none")
    ]
    mine, base = (statistics.median(found) if found else None for found in rates)
    if mine is None:
        return "-"
    return f"{mine:.0f} ({mine / base:.2f})" if base else f"{mine:.0f}"

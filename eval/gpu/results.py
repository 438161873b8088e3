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
        """Keep a result; it is on disk when this returns."""
        with self._lock:
            row = {"kind": kind, "t": round(elapsed(), 1), **values}
            self._rows.append(row)
            self._sink.write(json.dumps(row) + "\n")
            self._sink.flush()
            os.fsync(self._sink.fileno())

    def rows(self, kind: str) -> list[Row]:
        """All results of a kind."""
        with self._lock:
            return [row for row in self._rows if row["kind"] == kind]

    def write(self, name: str, text: str) -> None:
        """Replace a file at once, so that a reader never finds half of it."""
        path = self.folder / name
        part = path.with_name("." + name)
        part.write_text(text)
        part.rename(path)


def report(results: Results) -> str:
    """Everything measured so far, as Markdown."""

    def told(kind: str, text: str) -> list[str]:
        return [f"- {text.format(**row)}" for row in results.rows(kind)]

    about = [row.items() for row in results.rows("about")]
    parts = [
        ("", [f"- {k}: {v}" for row in about for k, v in row if k not in ("kind", "t")]),
        ("Starts", told("start", "{server}, {requests} requests: {seconds} s {flags}")
                   + told("died", "DIED {server}, {requests} requests: {cause} {flags}")),
        ("Kernels", _kernels(results)),
        ("Answers compared with no speculation",
         told("control", "{server} compared with itself at other batch sizes: {parted}/{total} "
              "differ") + _answers(results)
         + told("switched", "{server} switched to {policy}: {ok} {error}")),
        *_speeds(results),
        ("Failures", [f"- {row}" for row in results.rows("failed") + results.rows("error")]),
        ("Stages", told("stage", "{name}: {seconds} s {error}")),
    ]  # fmt: skip
    lines = [f"# Sprint, {elapsed():.0f} s after its start"]
    for title, body in parts:
        if body:
            lines += ["", *([f"## {title}", ""] if title else []), *body]
    return "\n".join(lines) + "\n"


def _kernels(results: Results) -> list[str]:
    lines = []
    for row in results.rows("kernels"):
        counts = f"{row['passed']} passed, {len(row['failed'])} failed"
        lines.append(f"- {row['part']}: exit code {row['code']}, {counts}, {row['seconds']} s")
        lines += [f"  - {failure}" for failure in row["failed"]]
    for row in results.rows("c2t state"):
        state = row["state"] if isinstance(row["state"], dict) else {}
        serving = (state.get("serving") or [{}])[0]
        reason = serving.get("unpacked_because")
        lines.append(f"- {row['server']}: packed {serving.get('packed')}, {reason}")
    return lines


def _answers(results: Results) -> list[str]:
    lines = []
    for row in results.rows("answers"):
        counts = f"{row['parted']}/{row['total']} differ, {len(row['wrong'])} wrong"
        where = f"{row['server']}, {row['method']}, batch {row['batch']}"
        lines.append(f"- {where}: {counts}, tau {row['tau']}")
    return lines


def _speeds(results: Results) -> Iterator[tuple[str, list[str]]]:
    """For each model shape: tokens/s by method and batch, then what a step was."""
    cells = results.rows("cell")
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        mine = [cell for cell in cells if cell["shape"] == shape]
        title = f"{shape}: decoded tokens/s (ratio to no speculation), median of repeats"
        yield title, [*_speed_table(mine), "", *_step_table(mine)]


def _speed_table(cells: Sequence[Row]) -> list[str]:
    batches = sorted({cell["batch"] for cell in cells})
    lines = [markdown.row("method", [str(batch) for batch in batches])]
    lines.append(markdown.rule(len(batches)))
    for method in dict.fromkeys(cell["method"] for cell in cells):
        lines.append(markdown.row(method, [_speed(cells, method, batch) for batch in batches]))
    return lines


def _speed(cells: Sequence[Row], method: str, batch: int) -> str:
    mine, base = (_rates(cells, name, batch) for name in (method, "none"))
    if not mine:
        return "-"
    median = statistics.median(mine)
    return f"{median:.0f} ({median / statistics.median(base):.2f})" if base else f"{median:.0f}"


def _rates(cells: Sequence[Row], method: str, batch: int) -> list[float]:
    of_cell = method, batch
    return [c["tokens_per_second"] for c in cells if (c["method"], c["batch"]) == of_cell]


def _step_table(cells: Sequence[Row]) -> list[str]:
    last = {(cell["method"], cell["batch"]): cell for cell in cells}
    names = ["batch", "tau", "ms a step", "rows a step", "answers that differ"]
    lines = [markdown.row("method, last repeat", names), markdown.rule(len(names))]
    for (method, batch), cell in last.items():
        ms, rows = (cell[name] / cell["steps"] for name in ("decode_s", "rows"))
        differ = "-" if cell["parted"] is None else f"{cell['parted']}/{cell['requests']}"
        values = [str(batch), str(cell["tau"]), f"{1e3 * ms:.2f}", f"{rows:.0f}", differ]
        lines.append(markdown.row(method, values))
    return lines

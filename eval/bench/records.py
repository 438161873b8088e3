"""Files of a benchmark run: ``run.json`` and one JSONL file per measured cell.

    DIR/run.json                                             what was run, and its conditions
    DIR/cells/METHOD.tTEMPERATURE.cCONCURRENCY.rREPEAT.jsonl the first line describes the cell,
                                                             each further line one request

A cell's file appears whole or not at all, so a cell that has one is done. Knows nothing of
servers or of what the numbers mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from eval.metrics import SpecTotals
from sglang_c2t.files import read_text, write_whole

FORMAT = 1
RUN_FILE = "run.json"
CELLS = "cells"

#: Bytes of a file of a run.
LARGEST = 1 << 28

T = TypeVar("T")


class RecordError(ValueError):
    """A file of a run is missing, cut short, or of another format."""


@dataclass(frozen=True, order=True)
class CellKey:
    """Which cell: a method at a temperature and a concurrency, and the number of its repeat."""

    method: str
    temperature: float
    concurrency: int
    repeat: int

    @property
    def file_name(self) -> str:
        """Name of its file in the folder of cells."""
        return f"{slug(self.method)}.t{self.temperature:g}.c{self.concurrency}.r{self.repeat}.jsonl"

    def __str__(self) -> str:
        return (
            f"{self.method}, temperature {self.temperature:g}, {self.concurrency} at once, "
            f"repeat {self.repeat}"
        )


def slug(name: str) -> str:
    """The name with what a file name should not hold replaced: ``fixed 3`` is ``fixed-3``."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", name).strip("-.")


@dataclass(frozen=True)
class Request:
    """One prompt and its answer. Times are seconds of the client's clock."""

    index: int  # of the prompt in the data set
    family: str
    prompt_len: int  # tokens
    output_len: int  # tokens
    output_ids: tuple[int, ...]
    start_s: float  # since the start of the cell
    latency_s: float
    ttft_s: float
    success: bool
    error: str = ""
    meta: dict[str, Any] = field(default_factory=dict)  # SGLang's spec_* keys, finish_reason


@dataclass(frozen=True)
class Cell:
    """One measured cell and its requests, in the order of their prompts."""

    method: str
    temperature: float
    concurrency: int
    repeat: int
    started: str  # ISO 8601
    duration_s: float  # from the first request sent to the last answer read
    output_tokens: int
    tokens_per_second: float  # of the time with a request under way
    client: dict[str, Any]  # SGLang's own result, scalars only
    work: dict[str, int]  # what the plugin's counters grew by; {} without the plugin's counters
    metrics: dict[str, float]  # what the c2t:* series of /metrics grew by; {} without --c2t
    server_argv: list[str]
    requests: tuple[Request, ...] = ()
    clock: dict[str, float] | None = None  # what the server's step clock timed, if it has one
    planner: dict[str, Any] | None = None  # its dict at the end, if the method plans
    cpu_seconds: float | None = None  # of the server's processes, from before the load to after it

    @property
    def key(self) -> CellKey:
        """Which cell this is."""
        return CellKey(self.method, self.temperature, self.concurrency, self.repeat)

    @property
    def totals(self) -> SpecTotals:
        """Counts summed over its requests; they give tau and gamma."""
        return SpecTotals.from_meta_infos(request.meta for request in self.requests)

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """Generated token ids in the order of the prompts."""
        return [request.output_ids for request in self.requests]


@dataclass(frozen=True)
class Method:
    """A method as it was run. ``kind`` is one of none, fixed, adaptive, tree, c2t, c2t-tree."""

    name: str
    kind: str
    flags: list[str]
    beta: float | None = None
    baseline: bool = False


@dataclass(frozen=True)
class Run:
    """Contents of run.json; all but ``started`` and ``provenance`` must agree to resume."""

    started: str  # ISO 8601
    config: dict[str, Any]
    provenance: dict[str, Any]
    dataset: dict[str, Any]
    methods: tuple[Method, ...]
    format: int = FORMAT


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested tables and lists by their dotted names."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = [flat(item, f"{name}.{key}" if name else str(key)) for key, item in items]
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {name: value}


def write_run(folder: Path, run: Run) -> None:
    """Write ``folder``/run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(run), indent=1, ensure_ascii=False) + "\n"
    write_whole({folder / RUN_FILE: lambda path: path.write_text(text, encoding="utf-8")})


def read_run(folder: Path) -> Run:
    """The run in ``folder``; :class:`RecordError` where there is none that can be read."""
    path = folder / RUN_FILE
    try:
        data = json.loads(read_text(path, LARGEST))
    except FileNotFoundError as error:
        raise RecordError(
            f"{folder} holds no {RUN_FILE}: not the folder of a benchmark run"
        ) from error
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise RecordError(f"{path} has format {found!r}, this version reads format {FORMAT}")
    methods = tuple(_built(Method, row, path) for row in data.pop("methods", ()))
    return _built(Run, {**data, "methods": methods}, path)


def write_cell(folder: Path, cell: Cell) -> Path:
    """Write the cell's file, whole; its path."""
    path = folder / CELLS / cell.key.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {f.name: getattr(cell, f.name) for f in fields(cell) if f.name != "requests"}
    # With the number of requests a reader sees whether lines are missing.
    lines = [{**head, "num_requests": len(cell.requests)}, *map(asdict, cell.requests)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole({path: lambda tmp: tmp.write_text(text, encoding="utf-8")})
    return path


def read_cell(path: Path) -> Cell:
    """The cell in ``path``; :class:`RecordError` where it is cut short or no cell at all."""
    try:
        lines = [json.loads(line) for line in read_text(path, LARGEST).split("\n") if line]
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path}: {error}; delete it to measure it again") from error
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise RecordError(f"{path} holds no cell; delete it to measure it again")
    head, rows = lines[0], lines[1:]
    wanted = head.pop("num_requests", None)
    head.pop("steady", None)  # in older runs
    if len(rows) != wanted:
        raise RecordError(
            f"{path} is cut short: {len(rows)} of {wanted} requests; delete it to measure it again"
        )
    requests = tuple(
        _built(Request, {**row, "output_ids": tuple(row.get("output_ids", ()))}, path)
        for row in rows
    )
    return _built(Cell, {**head, "requests": requests}, path)


def has_cell(folder: Path, key: CellKey) -> bool:
    """Whether the cell is done."""
    return (folder / CELLS / key.file_name).exists()


def read_cells(folder: Path) -> tuple[list[Cell], list[str]]:
    """All cells that can be read, by name of file, and a sentence for each that cannot."""
    cells, broken = [], []
    for path in sorted((folder / CELLS).glob("*.jsonl")):
        if path.name.startswith("."):
            continue  # being written
        try:
            cells.append(read_cell(path))
        except RecordError as error:
            broken.append(str(error))
    return cells, broken


def _built(kind: type[T], values: Mapping[str, Any], path: Path) -> T:
    try:
        return kind(**values)
    except TypeError as error:
        raise RecordError(f"{path} is of another format: {error}") from error

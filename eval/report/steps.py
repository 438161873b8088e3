"""Where a decode step's time goes, of runs whose servers had the step clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from eval.gpu.models import SHAPES
from eval.gpu.roofline import Ceilings, step_floor
from eval.report.cells import UNTOLD_DRAFTS, Results
from eval.report.document import ABSENT, Block, Entry, Table, Text

COLUMNS = ["method", "rows", "tokens", "ms", "us per row", "floor, ms", "of it draft",
           "time / floor"]  # fmt: skip


def step_tables(results: Results, ceilings: Ceilings | None) -> Iterator[Block]:
    """A table for each batch size; nothing without a clock."""
    if not any(cell.clock for cell in results.cells.values()):
        return
    yield Text(_floor_sentence(results, ceilings))
    for temperature in results.temperatures:
        for batch in results.concurrencies(temperature):
            yield Table(
                f"Per step, batch {batch}",
                COLUMNS,
                [
                    (name, _entries(results, name, temperature, batch, ceilings))
                    for name in results.names
                    if any(cell.clock for cell in results.of(name, temperature, batch))
                ],
            )


def _floor_sentence(results: Results, ceilings: Ceilings | None) -> str:
    if ceilings is None or _shape(results) is None:
        return "No ceilings were given, or the model is none of our shapes, so there are no floors."
    return (
        f"Floor: the bytes and operations of target and draft forwards (about "
        f"{_context(results):.0f} tokens of context) at {ceilings.bytes_per_s / 1e12:.2f} TB/s and "
        f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s, both measured on {ceilings.gpu}. Gated "
        "methods are charged for drafts of full depth."
    )


def _shape(results: Results) -> Any:
    return SHAPES.get(results.pair[1])


def _context(results: Results) -> float:
    """Tokens behind which the average step decodes."""
    prompts = [cell.prompt_tokens for cell in results.cells.values()]
    answer = (results.run.config.get("requests") or {}).get("max_new_tokens", 0)
    return float(statistics.fmean(prompts) + answer / 2)


def _entries(
    results: Results, name: str, temperature: float, batch: int, ceilings: Ceilings | None
) -> list[Entry]:
    clocks = [cell.clock for cell in results.of(name, temperature, batch) if cell.clock]
    steps = sum(clock["steps"] for clock in clocks)
    rows = sum(clock["rows"] for clock in clocks) / steps
    tokens = sum(clock["tokens"] for clock in clocks) / steps
    ms = statistics.median(1e3 * clock["seconds"] / clock["steps"] for clock in clocks)
    told = [f"{rows:.1f}", f"{tokens:.1f}", f"{ms:.2f}", f"{1e3 * ms / rows:.1f}"]
    shape, kind = _shape(results), results.kind(name)
    # How deep SGLang's adaptive rule drafted is not known.
    if ceilings is None or shape is None or kind in UNTOLD_DRAFTS:
        return [Entry(text) for text in told] + [ABSENT] * (len(COLUMNS) - 1 - len(told))
    method = next(m for m in results.run.config["methods"] if m["name"] == name)
    floor = step_floor(
        shape, ceilings, rows=rows, batch=batch, context=_context(results),
        num_steps=0 if kind == "none" else method["num_steps"],
    )  # fmt: skip
    least = 1e3 * floor.total
    told += [f"{least:.2f}", f"{1e3 * floor.draft:.2f}", f"{ms / least:.2f}"]
    return [Entry(text) for text in told]

"""One run's report: its parts in order, and the files it is written to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eval.gpu.roofline import Ceilings
from eval.report.cells import Results
from eval.report.charts import charts
from eval.report.document import Block, Document, Heading
from eval.report.markdown import PLOTS, markdown
from eval.report.page import page
from eval.report.steps import step_tables
from eval.report.tables import (
    appendix,
    checks,
    conditions,
    family_table,
    latency_table,
    length_table,
    ramp_tables,
    reading,
    rung_table,
    speed_tables,
    verdict,
    work_table,
)
from sglang_c2t.files import write_texts


def report(results: Results, ceilings: Ceilings | None = None) -> Document:
    """The whole report of a run; with the GPU's ``ceilings``, floors of a step as well."""
    name = results.run.config.get("name") or results.run.dataset.get("name") or "a run"
    return Document(f"Benchmark: {name}", list(_blocks(results, ceilings)))


def _blocks(results: Results, ceilings: Ceilings | None) -> Iterator[Block]:
    yield from verdict(results)
    yield from conditions(results)
    yield from reading(results)
    for temperature in results.temperatures:
        yield Heading(2, f"Temperature {temperature:g}")
        yield from ramp_tables(results, temperature)
        yield from speed_tables(results, temperature)
        yield work_table(results, temperature)
        yield family_table(results, temperature)
        if (lengths := length_table(results, temperature)) is not None:
            yield lengths
        yield Heading(3, f"Plots, temperature {temperature:g}")
        yield from charts(results, temperature)
    yield from step_tables(results, ceilings)
    yield from checks(results)
    yield Heading(2, "Every concurrency")
    for temperature in results.temperatures:
        for concurrency in results.concurrencies(temperature):
            yield rung_table(results, temperature, concurrency)
            yield latency_table(results, temperature, concurrency)
    yield from appendix(results)


def write(document: Document, folder: Path, stem: str = "report") -> list[Path]:
    """Write the page, the Markdown and its plots, all or none; the paths of the first two."""
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    texts = {
        folder / PLOTS / f"{figure.name}.svg": figure.svg + "\n" for figure in document.figures
    }
    named = {folder / f"{stem}.html": page(document), folder / f"{stem}.md": markdown(document)}
    write_texts(texts | named)
    return list(named)

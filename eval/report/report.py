"""One run's report: its parts in order, and the files it is written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.gpu.roofline import Ceilings
from eval.report.cells import Results
from eval.report.charts import main_chart, speed_charts, work_charts
from eval.report.document import (
    Block,
    Bullets,
    Document,
    Fold,
    Heading,
    Headline,
    Mark,
    Text,
)
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
    load_table,
    ramp_tables,
    rate_table,
    reading,
    rung_table,
    short_conditions,
    soundness,
    speed_tables,
    work_table,
)
from eval.report.verdict import grafted, headline, standing
from sglang_c2t.files import write_texts


def report(results: Results, ceilings: Ceilings | None = None) -> Document:
    """The whole report of a run; with the GPU's ``ceilings``, floors of a step as well."""
    name = results.run.config.get("name") or results.run.dataset.get("name") or "a run"
    return Document(f"Benchmark: {name}", list(_blocks(results, ceilings)))


def _blocks(results: Results, ceilings: Ceilings | None) -> Iterator[Block]:
    """The answer first: in words, as a plot, as a table. What it rests on is folded behind it."""
    first, *others = results.temperatures
    told = soundness(results)
    yield from _answer(results, first, [text for text in told if text.mark is Mark.BAD])
    yield from (text for text in told if text.mark is not Mark.BAD)
    yield short_conditions(results)
    for temperature in others:
        yield Heading(2, f"Temperature {temperature:g}")
        yield from _answer(results, temperature)
    yield from _folds(results, ceilings)


def _answer(results: Results, temperature: float, warnings: Sequence[Text] = ()) -> Iterator[Block]:
    """Of one temperature, whether it pays, where and by how much."""
    yield Headline(headline(results, temperature))
    yield from warnings
    if results.pair[1]:
        yield grafted(*results.pair)
    if (figure := main_chart(results, temperature)) is not None:
        yield figure
    if sentences := standing(results, temperature):
        yield Bullets(sentences)
    yield from ramp_tables(results, temperature)
    if results.phases(temperature):
        return
    if results.baseline is not None:
        yield load_table(results, temperature, results.baseline)
    else:  # then how fast each is, is all that is known
        yield from speed_charts(results, temperature)[:1]
        yield rate_table(results, temperature)


def _folds(results: Results, ceilings: Ceilings | None) -> Iterator[Fold]:
    several = len(results.temperatures) > 1
    for temperature in results.temperatures:
        where = f", temperature {temperature:g}" if several else ""
        yield Fold(
            f"Speed of every method{where}",
            "tokens/s and speed-ups at each load, latency",
            list(_speed(results, temperature)),
        )
        yield Fold(
            f"Accepted and verified drafts{where}",
            "tau and gamma by family and pooled, rows and forwards per token, lengths",
            list(_work(results, temperature)),
        )
    if steps := list(step_tables(results, ceilings)):
        yield Fold("Where a step's time goes", "rows and milliseconds per step", steps)
    yield Fold("Checks", "outputs, metrics, failures, missing cells", list(checks(results)))
    yield Fold("What was measured", "methods, prompts, versions, command",
               list(conditions(results)))  # fmt: skip
    yield Fold("How to read it", "tau, gamma, speed-up, intervals", list(reading(results)))
    yield Fold("Every concurrency", "all numbers of each load", list(_rungs(results)))
    yield Fold("Configuration and servers", "as recorded", list(appendix(results)))


def _speed(results: Results, temperature: float) -> Iterator[Block]:
    """But for what has been shown already."""
    shown = results.baseline is None and not results.phases(temperature)
    for table in speed_tables(results, temperature):
        if not (shown and table == rate_table(results, temperature)):
            yield table
    yield from speed_charts(results, temperature)[int(shown) :]


def _work(results: Results, temperature: float) -> Iterator[Block]:
    yield family_table(results, temperature)
    yield work_table(results, temperature)
    if (lengths := length_table(results, temperature)) is not None:
        yield lengths
    yield from work_charts(results, temperature)


def _rungs(results: Results) -> Iterator[Block]:
    for temperature in results.temperatures:
        for concurrency in results.concurrencies(temperature):
            yield rung_table(results, temperature, concurrency)
            yield latency_table(results, temperature, concurrency)


def write(document: Document, folder: Path, stem: str = "report") -> list[Path]:
    """Write the page, the Markdown and its plots, all or none; the paths of the first two."""
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    texts = {
        folder / PLOTS / f"{figure.name}.svg": figure.svg + "\n" for figure in document.figures
    }
    named = {folder / f"{stem}.html": page(document), folder / f"{stem}.md": markdown(document)}
    write_texts(texts | named)
    return list(named)

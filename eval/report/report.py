"""One run's report: the answer first, in words, as a plot and as a table; details are folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eval.bench.config import named
from eval.gpu.models import SHAPES
from eval.report import tables
from eval.report.charts import pareto_chart, ratio_chart
from eval.report.intervals import LEVEL, NUM_RESAMPLES
from eval.report.page import Fold, Report
from eval.report.results import Results
from eval.report.verdict import (
    UNIT,
    escaped,
    failure_sentence,
    headline,
    highlighted,
    metric_sentence,
    output_sentence,
    speedups,
)

MAX_LISTED = 20
READING = (
    "**tau**: tokens per verification, the bonus token included. The C2T paper leaves it out, so "
    "its tau is smaller by 1. **gamma**: drafts verified per verification, the root not counted.",
    "**target rows per token**: rows of the target's decode and verify forwards per output token, "
    "without prefill. **draft forwards**: of the draft loop, each of a whole batch.",
    "**tokens/s**: output tokens by the client's clock, prefill included, until fewer requests run "
    f"than the load says. {tables.FAILED.strip()} marks cells in which requests failed.",
    "**speed-up**: geometric mean of ratios within repeats, whose methods ran interleaved. Its "
    f"interval is a {LEVEL:.0%} t interval on logarithms. The noise is estimated from all methods "
    "at that load together, each repeat a block; one repeat gives no interval. A win (interval "
    "above 1) is bold, a loss (below 1) and a tie (1 inside) say so. Among twenty ties, one is "
    "expected to look like a win or a loss.",
    f"Intervals of tau and gamma: {LEVEL:.0%}, from {NUM_RESAMPLES} resamples of the prompts "
    "within their families. They say how far other prompts of the same kind would move the number.",
)


def report(results: Results) -> Report:
    """The whole report of a run."""
    name = results.run.config.get("name") or results.run.dataset.get("name") or "a run"
    found = Report(f"Benchmark: {name}")
    sound = [f(results) for f in (output_sentence, metric_sentence, failure_sentence)]
    bad = [text for text in sound if text.startswith("**")]  # comes right after the first headline
    for i, temperature in enumerate(results.temperatures):
        first, *others = _answer(found, results, temperature)
        found.answer += [f"## Temperature {temperature:g}"] * (i > 0)
        found.answer += [first, *bad * (i == 0), *others]
    found.answer += [*(text for text in sound if text not in bad), short_conditions(results)]
    for temperature in results.temperatures:
        where = f", temperature {temperature:g}" * (len(results.temperatures) > 1)
        found.folds += [
            Fold(f"Speed of every method{where}", "tokens/s and speed-ups at each load",
                 list(tables.speed_tables(results, temperature))),
            Fold(f"Accepted and verified drafts{where}", "tau and gamma, rows and forwards",
                 [tables.work_table(results, temperature)]),
            Fold(f"Every load{where}", "latency percentiles, tau and gamma, steps",
                 [tables.every_load_table(results, temperature)]),
        ]  # fmt: skip
    found.folds += [
        Fold("Checks", "outputs, metrics, failures, missing cells", [*sound, *_checks(results)]),
        Fold("What was measured", "prompts, versions, configuration, servers",
             [tables.condition_table(results)]),
        Fold("How to read it", "tau, gamma, speed-up, intervals", [bullets(READING)]),
    ]  # fmt: skip
    return found


def _answer(found: Report, results: Results, temperature: float) -> Iterator[str]:
    """One temperature: whether speculation pays, where and by how much."""
    yield headline(results, temperature)
    pair, shape = named(str((results.run.config.get("model") or {}).get("target", "")))
    if shape in SHAPES:
        yield (
            f"**Acceptance, confidences and answers are those of the small pair {pair}, written "
            f"into models of the shape {shape} (eval/gpu/graft.py), which are random otherwise.**"
        )
    series = {name: speedups(results, name, temperature)
              for name in results.kinds if name != results.baseline}  # fmt: skip
    if not any(series.values()):
        return
    yield found.show(ratio_chart(
        f"speedup-t{temperature:g}", series, highlighted(results, temperature),
        str(results.baseline), f"times {UNIT}",
        f"Speed-up over no speculation by requests at once, temperature {temperature:g}",
    ))  # fmt: skip
    if points := tables.pareto_points(results, temperature):
        yield found.show(pareto_chart(
            f"pareto-t{temperature:g}", points, highlighted(results, temperature),
            f"Throughput and speed of each request, temperature {temperature:g}",
        ))  # fmt: skip
    yield tables.load_table(results, temperature)


def bullets(items: Sequence[str]) -> str:
    """A list; of a long one the beginning."""
    rest = len(items) - MAX_LISTED
    shown = [*items[:MAX_LISTED], *([f"and {rest} more"] if rest > 0 else [])]
    return "\n".join(f"- {item}" for item in shown)


def short_conditions(results: Results) -> str:
    """Hardware, versions, models and prompts, in a paragraph."""
    known = tables.conditions(results)
    names = ("hardware.gpus.0", "hardware.cpu", "hardware.cores", "versions.sglang-c2t",
             "versions.sglang", "versions.torch", "revision", "config.model.target",
             "config.model.draft", "config.model.algorithm", "dataset.n", "dataset.name",
             "config.requests.max_new_tokens", "config.repeats")  # fmt: skip
    parts = [f"{name.removesuffix('.0').split('.')[-1]} {known[name]}" for name in names
             if known.get(name, "None") != "None"]  # fmt: skip
    return escaped(f"Measured on {', '.join(parts)}; started {results.run.started}.")


def _checks(results: Results) -> Iterator[str]:
    if any(one.prompts for one in results.outputs):
        yield (
            "Each cell is compared with no speculation at the same temperature and load. If "
            "repeats of no speculation differ from each other, the batch alone changes outputs, "
            "through the order of floating-point sums."
        )
    failed = results.cells[results.cells.failures != ""]
    for items in (
        [str(one) for one in results.outputs if one.prompts],
        [one for found in results.cells.disagreements.dropna() for one in found],
        [f"{cell.key}: {cell.failures}" for cell in failed.itertuples()],
        [f"missing: {key}" for key in results.missing],
        results.problems,
    ):
        if items:
            yield bullets([escaped(item) for item in items])

"""The report's tables: data frames of texts as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from eval.bench.records import flat
from eval.report.intervals import Estimate
from eval.report.results import UNKNOWN_DRAFTS, Results
from eval.report.verdict import UNIT, escaped, leader, speedups

ABSENT = "-"
FAILED = " †"

#: Kinds of rates, each with what distinguishes it from the first.
RATES = {
    "speed": "",
    "decode": " in decode steps, without prefill",
    "thrift": " per second of the servers' CPU time",
}


def markdown(
    title: str, rows: Mapping[str, Mapping[str, str]], note: str = "", *, head: str = "method",
    align: str = "right",
) -> str:  # fmt: skip
    """A titled pipe table; ``rows`` are texts by column, absent ones a dash."""
    table = pd.DataFrame.from_dict(rows, orient="index").fillna(ABSENT).rename_axis(head)
    sides = ["left", *[align] * len(table.columns)]
    text = table.to_markdown(colalign=sides, disable_numparse=True)
    return f"**{title}**\n\n{text}" + (f"\n\n{note}" if note else "")


def ratio_text(ratio: Estimate | None) -> str:
    """A ratio: bold for a win; a loss and a tie say so."""
    if ratio is None:
        return ABSENT
    if ratio.verdict == "win":
        return f"**{ratio.text()}**"
    return f"{ratio.text()} {ratio.verdict}".rstrip()


def number(value: float, digits: int = 2) -> str:
    """A number, or a dash for nan."""
    return ABSENT if np.isnan(value) else f"{value:.{digits}f}"


def rate_text(results: Results, name: str, temperature: float, load: int) -> str:
    """Tokens per second [slowest, fastest repeat]; marked where requests failed."""
    speed, cells = results.speed(name, temperature, load), results.of(name, temperature, load)
    if speed is None:
        return ABSENT if cells.empty else "failed"
    return speed.text(0 if speed.value >= 100 else 1) + FAILED * bool(cells.failures.any())


def over(
    results: Results, name: str | None, other: str | None, temperature: float, load: int | None,
    rate: str = "speed",
) -> str:  # fmt: skip
    """Ratio to another method; 1 to itself."""
    if name == other:
        return "1"
    return ratio_text(results.ratio(name, other, temperature, load, rate))


def load_table(results: Results, temperature: float) -> str:
    """The headline's method, the best static one and the fastest at each load, and the losers."""
    base, method, rows = results.baseline, leader(results, temperature), {}
    found = {name: speedups(results, name, temperature) for name in results.kinds if name != base}

    def named(name: str | None, load: int) -> str:
        return f"{escaped(name)} {over(results, name, base, temperature, load)}"

    for c in results.loads(temperature):
        static = results.best_static(temperature, c)
        losers = [escaped(name) for name, ratios in found.items()
                  if c in ratios and ratios[c].verdict == "loss"]  # fmt: skip
        rows[str(c)] = {
            f"{escaped(base)}, tokens/s": rate_text(results, str(base), temperature, c),
            escaped(method): over(results, method, base, temperature, c),
            "the same over the best static": over(results, method, static, temperature, c),
            "best static": named(static, c),
            "fastest": named(results.fastest(results.kinds, temperature, c), c),
            "slower than no speculation": ", ".join(losers) or ABSENT,
        }
    return markdown(
        f"Speed-up by load, temperature {temperature:g}", rows,
        "Times the tokens/s of no speculation, 95 % intervals. Static: no speculation or one fixed "
        "length, known only afterwards. The best of several is chosen from the numbers shown, "
        "which biases its lead upwards.", head="at once",
    )  # fmt: skip


def pareto_points(
    results: Results, temperature: float
) -> dict[str, list[tuple[int, float, float]]]:
    """Load, tokens/s of a request (median) and of the server, by method; {} unless streamed at
    several loads.
    """
    loads, found = results.loads(temperature), {}
    for name in results.kinds if len(loads) > 1 else ():
        per_token = [results.of(name, temperature, c, answers=True).per_token_s for c in loads]
        speeds = [results.speed(name, temperature, c) for c in loads]
        points = [(c, 1.0 / each.median(), speed.value)
                  for c, each, speed in zip(loads, per_token, speeds, strict=True)
                  if speed is not None and each.notna().any()]  # fmt: skip
        if points:
            found[name] = points
    return found


def speed_tables(results: Results, temperature: float) -> Iterator[str]:
    """Tokens per second and speed-ups of every method at every load."""
    base, loads = results.baseline, results.loads(temperature)
    rates = {escaped(name): {f"c = {c}": rate_text(results, name, temperature, c) for c in loads}
             for name in results.kinds}  # fmt: skip
    yield markdown(f"Output tokens per second, temperature {temperature:g}", rates,
                   "c: requests at once. Geometric mean [slowest, fastest repeat].")  # fmt: skip
    for rate, by in RATES.items() if base is not None else ():
        ratios = {escaped(name): {
            ("all" if c is None else f"c = {c}"): over(results, name, base, temperature, c, rate)
            for c in (*loads, None)} for name in results.kinds}  # fmt: skip
        if results.cells[rate].notna().any():
            yield markdown(
                f"Speed-up over no speculation{by}, temperature {temperature:g}",
                ratios,
                "all: geometric mean over all loads, its interval over repeats.",
            )


def every_load_table(results: Results, temperature: float) -> str:
    """Tau, gamma, latency percentiles and step times of every method at every load."""
    rows = {}
    times = {"first token": "ttft_s", "per token": "per_token_s", "request": "latency_s"}
    for c in results.loads(temperature):
        static = results.best_static(temperature, c)
        for name in results.kinds:
            answers = results.of(name, temperature, c, answers=True)
            row = {
                "speed-up": over(results, name, results.baseline, temperature, c),
                "over best static": over(results, name, static, temperature, c),
                "request, mean ms": number(1e3 * answers.latency_s.mean(), 1),
                **{f"{label}, ms, {q:.0%}": number(1e3 * answers[column].quantile(q), 1)
                   for label, column in times.items() for q in (0.5, 0.95, 0.99)},
                **tau_gamma_row(results, name, temperature, c),
            }  # fmt: skip
            if clocks := [clock for clock in results.of(name, temperature, c).clock if clock]:
                clock = pd.DataFrame(clocks)
                row["step, ms"] = number(1e3 * (clock.seconds / clock.steps).median())
                row["rows per step"] = number(clock.rows.sum() / clock.steps.sum(), 1)
            rows[f"{c}, {escaped(name)}"] = row
    return markdown(
        f"Every load, temperature {temperature:g}", rows,
        f"speed-up: times {UNIT}. Percentiles over the requests of all repeats. step: by "
        "the server's step clock.",
        head="at once, method",
    )  # fmt: skip


def tau_gamma_row(
    results: Results, name: str, temperature: float, load: int | None = None, family: str = ""
) -> dict[str, str]:
    """Tau and gamma with their intervals, by column."""
    found = results.acceptance(name, temperature, load, family) or (None, None)
    label = f"{escaped(family)} " if family else ""
    return {f"{label}{which}": one.text() if one else ABSENT
            for which, one in zip(("tau", "gamma"), found, strict=True)}  # fmt: skip


def work_table(results: Results, temperature: float) -> str:
    """Accept length tau and gamma in total and by family; work per token."""
    rows: dict[str, dict[str, str]] = {}
    for name, kind in results.kinds.items():
        counts, cells = results.counts(name, temperature), results.of(name, temperature)
        row = rows[escaped(name)] = tau_gamma_row(results, name, temperature)
        proposed = 0.0 if kind in UNKNOWN_DRAFTS else counts.proposed.sum()
        row["drafts verified"] = f"{proposed:.0f}" if proposed else ABSENT
        row["accept rate"] = number(counts.correct.sum() / proposed) if proposed else ABSENT
        if tokens := cells.tokens.sum():
            for label in ("draft_forwards", "target_rows"):
                per_token = number(cells[label].sum(skipna=False) / tokens, 3)
                row[f"{label.replace('_', ' ')} per token"] = per_token
        for family in dict.fromkeys(results.prompts):
            row |= tau_gamma_row(results, name, temperature, family=family)
    note = "All concurrencies and repeats together."
    if UNKNOWN_DRAFTS & set(results.kinds.values()):
        note += (
            " SGLang reports an adaptive method's drafts as if all had the length of its flags; "
            "its gamma is counted from target rows, without an interval."
        )
    return markdown(f"Work, temperature {temperature:g}", rows, note)


def conditions(results: Results) -> dict[str, str]:
    """Conditions of the run: leaves of run.json by their dotted names."""
    run = results.run
    origin = {name: run.provenance.get(name) for name in ("hardware", "versions", "revision")}
    return {key: str(leaf) for key, leaf in flat(
        {**origin, "dataset": run.dataset, "config": run.config}).items()}  # fmt: skip


def condition_table(results: Results) -> str:
    """All conditions, and how each method's server was started."""
    argvs = results.cells.groupby("method").argv.last()
    every = conditions(results) | {"command": shlex.join(results.run.provenance.get("argv", ()))}
    every |= {f"server of {name}": shlex.join(argv) for name, argv in argvs.items()}
    rows = {escaped(name): {"recorded": escaped(text)} for name, text in every.items()}
    return markdown("Conditions", rows, head="condition", align="left")

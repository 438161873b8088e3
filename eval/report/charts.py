"""The report's plots, as SVG.

A method keeps its colour and its marker in all plots of a document. Colours are told apart with
the common kinds of colour blindness, and markers tell apart what shares a colour. Ink and paper
have colours of their own, so that a page can exchange them in dark mode.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from eval.bench.records import Method, slug
from eval.report.cells import Results
from eval.report.document import Figure
from eval.report.intervals import Estimate, Ratio

INK, RULE, PAPER = "#1f2328", "#d0d7de", "#fffffe"
#: Okabe and Ito's, the pale ones darkened to 3:1 on white; the first is no speculation's.
GREY = "#808488"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#bf6b9c", "#c08200", "#2f9ccd", "#8a6bd1")
MARKERS = "os^DvPX<>h"

WIDTH, HEIGHT = 5.4, 3.7  # inches; about the width of a phone, so that its text stays legible
SETTINGS: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 11, "axes.labelsize": 11, "legend.fontsize": 10,
    "xtick.labelsize": 10, "ytick.labelsize": 10, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": RULE,
    "figure.facecolor": PAPER, "axes.facecolor": "none", "savefig.facecolor": PAPER,
    "legend.frameon": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.linewidth": 0.7, "lines.linewidth": 1.6,
    "lines.markersize": 6, "axes.spines.top": False, "axes.spines.right": False,
    "errorbar.capsize": 2.5, "svg.fonttype": "path",
}  # fmt: skip
PANELS_PER_ROW = 3
#: Of the largest gamma to the smallest, from which on chains would be a heap below trees.
TREES = 4
CUT_BARS = "Bars: 95 % intervals, cut off where they leave the plot."


@dataclass(frozen=True)
class Style:
    """How a method is drawn everywhere."""

    color: str
    marker: str
    linestyle: str


def styles(names: Sequence[str], baseline: str | None) -> dict[str, Style]:
    """One for each method, by its place in the run."""
    found = {}
    for i, name in enumerate(name for name in names if name != baseline):
        dash = ("-", "--", "-.", ":")[i // len(COLOURS) % 4]
        found[name] = Style(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], dash)
    if baseline is not None:
        found[baseline] = Style(GREY, "*", ":")
    return found


def charts(results: Results, temperature: float) -> list[Figure]:
    """All plots of one temperature."""
    with matplotlib.rc_context(SETTINGS):
        return list(_charts(results, temperature))


def _charts(results: Results, temperature: float) -> Iterator[Figure]:
    yield from tau_gamma_charts(results, temperature)
    if len(results.concurrencies(temperature)) > 1:
        yield from over_concurrency(results, temperature)
    yield from histograms(results, temperature)


Points = dict[str, tuple[Estimate, Estimate]]  # tau and gamma


def tau_gamma_charts(results: Results, temperature: float) -> Iterator[Figure]:
    """Drafts verified, gamma, over tau: of all prompts, and of each family (C2T, figure 4)."""
    every = _points(results, temperature, None)
    if not every:
        return
    title = f"Drafts verified for an accept length, temperature {temperature:g}"
    yield _tau_gamma(results, f"tau-gamma-t{temperature:g}", title, {"all prompts": every})
    families = {
        family: points
        for family in results.families
        if (points := _points(results, temperature, family))
    }
    if len(families) > 1:
        yield _tau_gamma(results, f"tau-gamma-families-t{temperature:g}",
                         f"The same by family, temperature {temperature:g}", families)  # fmt: skip


def _points(results: Results, temperature: float, family: str | None) -> Points:
    found = {}
    for name in results.names:
        point = results.acceptance(name, temperature, family=family)
        if point is not None and point.gamma is not None:
            found[name] = (point.tau, point.gamma)
    return found


def _tau_gamma(results: Results, name: str, title: str, panels: Mapping[str, Points]) -> Figure:
    looks = styles(results.names, results.baseline)
    drawn = [name for name in results.names if any(name in points for points in panels.values())]
    lines = policy_lines(results.methods)
    canvas, axes = _grid(len(panels), legend=len(drawn))
    for axis, (panel, points) in zip(axes, panels.items(), strict=True):
        for members in lines:
            ours = sorted((points[member][1].value, points[member][0].value)
                          for member in members if member in points)  # fmt: skip
            axis.plot([tau for _, tau in ours], [gamma for gamma, _ in ours],
                      color=INK, linewidth=0.8, alpha=0.7, zorder=1)  # fmt: skip
        for method, (tau, gamma) in points.items():
            look = looks[method]
            axis.errorbar([tau.value], [gamma.value], xerr=_bars([tau]), yerr=_bars([gamma]),
                          color=look.color, marker=look.marker, linestyle="none",
                          elinewidth=0.9, markersize=8, markerfacecolor="none",
                          markeredgewidth=1.6, label=method)  # fmt: skip
        axis.set(title=panel if len(panels) > 1 else "", xlabel="tau: tokens per verification"
                 if len(panels) == 1 else "tau")  # fmt: skip
        axis.margins(0.12)
        gammas = [gamma.value for _, gamma in points.values()]
        if min(gammas) > 0 and max(gammas) > TREES * min(gammas):
            axis.set_yscale("log")
            _plain_log(axis)
    for axis in axes[::PANELS_PER_ROW]:
        axis.set_ylabel("gamma: drafts verified" if len(panels) == 1 else "gamma")
    _legend(canvas, axes, drawn)
    joined = " Lines join one policy at several thresholds, and fixed lengths." if lines else ""
    alt = (
        f"gamma over tau for {len(drawn)} methods. The numbers are in the tables on work and on "
        "families."
    )
    note = " Further to the right at the same height is better; bars: 95 %."
    return Figure(name, f"{title}.{note}{joined}", alt, _svg(canvas, name))


def policy_lines(methods: Iterable[Method]) -> list[list[str]]:
    """Methods that differ in one number only: thresholds of one policy, lengths of a chain."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for method in methods:
        if method.kind == "fixed":
            groups.setdefault(("fixed",), []).append(method.name)
        elif method.beta is not None:
            stem = re.sub(r"\s*beta\s*=?\s*[\d.]+$", "", method.name)
            groups.setdefault((method.kind, stem), []).append(method.name)
    return [names for names in groups.values() if len(names) > 1]


Value = Callable[[str, int], Estimate | None]


def over_concurrency(results: Results, temperature: float) -> Iterator[Figure]:
    """Throughput, speed-up over no speculation where there is such a baseline, and latency."""
    names, base = results.names, results.baseline

    def throughput(name: str, concurrency: int) -> Estimate | None:
        speed = results.speed(name, temperature, concurrency)
        return None if speed is None else speed.spread

    def latency(name: str, concurrency: int) -> Estimate | None:
        times = [t for cell in results.of(name, temperature, concurrency)
                 for t in cell.per_token_s]  # fmt: skip
        return Estimate(1e3 * sorted(times)[len(times) // 2]) if times else None

    yield _figure(
        results, temperature, names, "throughput", throughput, "output tokens per second",
        "Throughput over concurrency", "Bars: slowest and fastest repeat.",
        "Output tokens per second", "table on output tokens per second",
    )  # fmt: skip
    others = [name for name in names if name != base]
    if base is not None and others:
        yield _figure(
            results, temperature, others, "speedup",
            lambda name, concurrency: results.ratio(name, base, temperature, concurrency),
            "speed-up over no speculation", "Speed-up over no speculation",
            f"Below the line at 1, speculation loses. {CUT_BARS}",
            "Speed-up", "table on speed-up", ratios=True,
        )  # fmt: skip
    if any(cell.per_token_s.size for cell in results.cells.values()):
        yield _figure(
            results, temperature, names, "latency", latency, "ms per output token, median",
            "Time per output token after the first", "Median of requests.",
            "Milliseconds per output token", "tables on latency",
        )  # fmt: skip


def ratio_chart(
    results: Results,
    ratios: Mapping[str, Mapping[int, Ratio]],
    temperature: float,
    concurrencies: Sequence[int],
) -> Figure:
    """Tokens per second of one run over another's, ``results``, whose colours are taken."""
    with matplotlib.rc_context(SETTINGS):
        return _figure(
            results, temperature, list(ratios), "ratio",
            lambda name, concurrency: ratios[name].get(concurrency), "tokens/s, B / A",
            "Output tokens per second of B over A", CUT_BARS,
            "Ratio of tokens per second", "table on tokens/s of B over A",
            ratios=True, concurrencies=concurrencies,
        )  # fmt: skip


def _figure(
    results: Results, temperature: float, names: Sequence[str], kind: str, value: Value,
    label: str, title: str, note: str, what: str, where: str, *, ratios: bool = False,
    concurrencies: Sequence[int] | None = None,
) -> Figure:  # fmt: skip
    """A value of each method over concurrency: ``ratios`` about 1, others on a logarithmic axis.

    ``what`` it is, ``where`` its numbers are: for who cannot see it. Lines stand a little beside
    each other, so that bars stay visible.
    """
    looks = styles(results.names, results.baseline)
    shown = concurrencies or results.concurrencies(temperature)
    canvas, (axis,) = _grid(1, legend=len(names))
    drawn: list[float] = []
    for i, name in enumerate(names):
        found = [(c, estimate) for c in shown if (estimate := value(name, c)) is not None]
        if not found:
            continue
        drawn += [estimate.value for _, estimate in found]
        aside = 2 ** (0.24 * (i - (len(names) - 1) / 2) / max(1, len(names) - 1))
        look = looks[name]
        axis.errorbar([c * aside for c, _ in found], [e.value for _, e in found],
                      yerr=_bars([e for _, e in found]), color=look.color, marker=look.marker,
                      linestyle=look.linestyle, elinewidth=0.9, label=name)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="requests at once", ylabel=label)
    _legend(canvas, [axis], names)
    if ratios:
        _around_one(axis, drawn)
    else:
        axis.set_yscale("log")
        _plain_log(axis)
    alt = (
        f"{what} over requests at once for {len(names)} methods{', with a line at 1' * ratios}. "
        f"The numbers are in the {where}."
    )
    stem = f"{kind}-t{temperature:g}"
    return Figure(stem, f"{title}, temperature {temperature:g}. {note}", alt, _svg(canvas, stem))


def _around_one(axis: Axes, values: Sequence[float]) -> None:
    """A line at 1, and limits that show all points."""
    axis.axhline(1.0, color=INK, linewidth=1.4, zorder=0)
    low, high = min([1.0, *values]), max([1.0, *values])
    margin = 0.12 * (high - low) + 0.02
    # Two or three repeats give intervals that would leave the points no room.
    axis.set_ylim(max(0.0, low - margin), high + margin)


def _plain_log(axis: Axes) -> None:
    """A logarithmic axis with few, plain numbers."""
    low, high = axis.get_ylim()
    steps: tuple[float, ...] = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    if math.log10(high / low) < 0.6:
        steps = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
    axis.yaxis.set_major_locator(FixedLocator(ticks) if len(ticks) > 2 else MaxNLocator(5))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}".replace(",", " ")))
    axis.yaxis.set_minor_locator(NullLocator())


def histograms(results: Results, temperature: float) -> Iterator[Figure]:
    """How many tokens a verification gained, and how many drafts it verified."""
    kinds = (
        ("accept", "Tokens gained per verification, bonus included", results.accept_lengths, ""),
        ("draft", "Drafts verified per verification", results.proposed_lengths,
         " Stock servers tell none; fixed chains and trees have one length."),
    )  # fmt: skip
    for kind, title, lengths, note in kinds:
        found = {name: counts for name in results.names if (counts := lengths(name, temperature))}
        if found:
            name = f"{kind}-lengths-t{temperature:g}"
            yield Figure(
                name,
                f"{title}, % of verifications, temperature {temperature:g}; m: mean.{note}",
                f"{title}: a histogram for each of {len(found)} methods. Means and quantiles are "
                "in the table on lengths per verification.",
                _svg(_histograms(results, found), name),
            )


def _histograms(results: Results, found: Mapping[str, Counter[int]]) -> Canvas:
    looks = styles(results.names, results.baseline)
    canvas, axes = _grid(len(found), legend=0, panel=1.5)
    low = min(min(counts) for counts in found.values())
    high = max(max(counts) for counts in found.values())
    for axis, (name, counts) in zip(axes, found.items(), strict=True):
        total = sum(counts.values())
        mean = sum(length * count for length, count in counts.items()) / total
        axis.bar(list(counts), [100 * count / total for count in counts.values()], width=0.85,
                 color=looks[name].color)  # fmt: skip
        axis.set_title(f"{_shortened(name)}\nm = {mean:.2f}", fontsize=10)
        axis.set_xlim(low - 0.6, high + 0.6)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.grid(axis="x", visible=False)
    top = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(0, top)
    return canvas


def _shortened(name: str, length: int = 22) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _grid(panels: int, legend: int, panel: float = 2.2) -> tuple[Canvas, list[Axes]]:
    """A figure of so many panels, with room for ``legend`` entries below."""
    width = min(panels, PANELS_PER_ROW)
    rows = -(-panels // width)
    body = HEIGHT if panels == 1 else rows * panel + 0.4
    canvas = Canvas(figsize=(WIDTH, body + 0.22 * -(-legend // 2)), layout="constrained")
    every = list(canvas.subplots(rows, width, squeeze=False).flat)
    for axis in every[panels:]:
        axis.set_axis_off()
    return canvas, every[:panels]


def _legend(canvas: Canvas, axes: Sequence[Axes], names: Sequence[str]) -> None:
    """Below the panels, in the order of the tables, each method once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = [name for name in names if name in handles]
    columns = 3 if len(shown) > 8 and max(map(len, shown)) < 18 else 2
    canvas.legend([handles[name] for name in shown], shown, loc="outside lower center",
                  ncols=columns)  # fmt: skip


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of error bars; none where there is no interval."""
    return [
        [e.value - e.low if e.has_interval else 0.0 for e in estimates],
        [e.high - e.value if e.has_interval else 0.0 for e in estimates],
    ]


def _svg(canvas: Canvas, name: str) -> str:
    """The figure as an SVG element whose ids no other figure has; same input, same text."""
    sink = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        canvas.savefig(sink, format="svg", metadata={"Date": None})
    text = sink.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    stem = slug(name)
    text = re.sub(r'\bid="', f'id="{stem}-', text)
    return re.sub(r'(url\(|href=")#', rf"\1#{stem}-", text)

"""The report's plots, as SVG.

Plots over load colour the few methods that matter, blue the headline's, and leave the others grey;
each line carries its name at its end. Where points are told apart by a legend, a method has a
colour and a marker of its own. All colours are those of :data:`THEME`, which a page may exchange,
so that they stay legible in dark mode. Texts stay texts.
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
from scipy.optimize import isotonic_regression

from eval.bench.records import Method, slug
from eval.report.cells import Results
from eval.report.document import Figure
from eval.report.intervals import Estimate, Ratio
from eval.report.verdict import answer, best_of, candidates, rate_of

INK, RULE, PAPER, GREY = "#1f2328", "#d0d7de", "#fffffe", "#6a737c"
LOSS, BAND = "#a83c00", "#fdebe0"
#: Okabe and Ito's, darkened until they are legible as text on white.
COLOURS = ("#0072b2", "#b34d00", "#a34d83", "#00795a", "#8f6100", "#1f7ea6", "#6f56c0")
MARKERS = "os^DvPX<>h"
#: What a page calls these colours; both modes of its own are in page.css.
THEME = {
    INK: "ink", RULE: "rule", GREY: "grey", LOSS: "loss", BAND: "loss-band",
    **{colour: f"line-{i}" for i, colour in enumerate(COLOURS, 1)},
}  # fmt: skip

Size = tuple[float, float]  # inches, of which a page shows about 100 pixels each
WIDTH, HEIGHT = 5.4, 3.7  # about the width of a phone, so that its text stays legible
WIDE, NARROW = (10.2, 4.7), (4.3, 4.2)  # the main plot, which has the page's whole width
LABEL = 0.19  # height of a line's name
ROOM = 1.0  # width per load in which numbers stand beside points
SETTINGS: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 11, "axes.labelsize": 11, "legend.fontsize": 10,
    "xtick.labelsize": 10, "ytick.labelsize": 10, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": RULE,
    "figure.facecolor": PAPER, "axes.facecolor": "none", "savefig.facecolor": PAPER,
    "legend.frameon": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.linewidth": 0.7, "lines.linewidth": 1.6,
    "lines.markersize": 6, "axes.spines.top": False, "axes.spines.right": False,
    "errorbar.capsize": 2.5, "svg.fonttype": "none",
}  # fmt: skip
PANELS_PER_ROW = 3
#: Of the largest gamma to the smallest, from which on chains would be a heap below trees.
TREES = 4


@dataclass(frozen=True)
class Style:
    """How a method is drawn everywhere."""

    color: str
    marker: str
    linestyle: str


#: Of methods that do not stand out.
PLAIN = Style(GREY, "o", "-")


def styles(
    names: Sequence[str], baseline: str | None, first: Sequence[str] = ()
) -> dict[str, Style]:
    """One for each method, by its place in the run; ``first`` have the first colours."""
    found = {}
    ordered = dict.fromkeys((*first, *names))
    for i, name in enumerate(name for name in ordered if name != baseline):
        dash = ("-", "--", "-.", ":")[i // len(COLOURS) % 4]
        found[name] = Style(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], dash)
    if baseline is not None:
        found[baseline] = Style(INK, "*", "--")
    return found


def highlighted(results: Results, temperature: float) -> list[str]:
    """The headline's method, the best fixed length, and SGLang's own adaptive rule."""
    kinds = ([name for name in results.names if results.kind(name) == kind]
             for kind in ("fixed", "adaptive"))  # fmt: skip
    found = (best_of(results, names, temperature) for names in (candidates(results), *kinds))
    return [name for name in dict.fromkeys(found) if name is not None]


def main_chart(results: Results, temperature: float) -> Figure | None:
    """Speed over no speculation, by load; None without that baseline or without another method."""
    base, found = results.baseline, answer(results, temperature)
    if base is None or found is None:
        return None
    rate, unit = rate_of(results, temperature)
    names = [name for name in results.names if name != base]
    shown = results.concurrencies(temperature)

    def value(name: str, concurrency: int) -> Ratio | None:
        return results.ratio(name, base, temperature, concurrency, rate)

    return ratio_figure(
        results, temperature, names, value, shown, kind="speedup", label=f"times {unit}",
        title="Speed-up over no speculation", reference=base, where="tables on speed-up",
    )  # fmt: skip


def speed_charts(results: Results, temperature: float) -> list[Figure]:
    """Throughput and latency over concurrency; nothing of one concurrency alone."""
    if len(results.concurrencies(temperature)) < 2:
        return []
    with matplotlib.rc_context(SETTINGS):
        return list(_speed_charts(results, temperature))


def work_charts(results: Results, temperature: float) -> list[Figure]:
    """What was drafted, verified and accepted."""
    with matplotlib.rc_context(SETTINGS):
        return [*tau_gamma_charts(results, temperature), *histograms(results, temperature)]


def _looks(results: Results, temperature: float) -> dict[str, Style]:
    return styles(results.names, results.baseline, highlighted(results, temperature))


Points = dict[str, tuple[Estimate, Estimate]]  # tau and gamma


def tau_gamma_charts(results: Results, temperature: float) -> Iterator[Figure]:
    """Drafts verified, gamma, over tau: of each family, and of all prompts (C2T, figure 4)."""
    every = _points(results, temperature, None)
    if not every:
        return
    title = f"Drafts verified for an accept length, temperature {temperature:g}"
    families = {
        family: points
        for family in results.families
        if (points := _points(results, temperature, family))
    }
    stem = f"t{temperature:g}"
    if len(families) > 1:
        yield _tau_gamma(results, temperature, f"tau-gamma-families-{stem}",
                         f"{title}, by family", families)  # fmt: skip
    yield _tau_gamma(results, temperature, f"tau-gamma-{stem}", title, {"all prompts": every})


def _points(results: Results, temperature: float, family: str | None) -> Points:
    found = {}
    for name in results.names:
        point = results.acceptance(name, temperature, family=family)
        if point is not None and point.gamma is not None:
            found[name] = (point.tau, point.gamma)
    return found


def _tau_gamma(
    results: Results, temperature: float, name: str, title: str, panels: Mapping[str, Points]
) -> Figure:
    looks = _looks(results, temperature)
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


def _speed_charts(results: Results, temperature: float) -> Iterator[Figure]:
    def throughput(name: str, concurrency: int) -> Estimate | None:
        speed = results.speed(name, temperature, concurrency)
        return None if speed is None else speed.spread

    def latency(name: str, concurrency: int) -> Estimate | None:
        times = [t for cell in results.of(name, temperature, concurrency)
                 for t in cell.per_token_s]  # fmt: skip
        return Estimate(1e3 * sorted(times)[len(times) // 2]) if times else None

    kinds: list[tuple[str, Value, str, str, str]] = [
        ("throughput", throughput, "output tokens per second",
         "Throughput over concurrency. Bars: slowest and fastest repeat",
         "table on output tokens per second"),
    ]  # fmt: skip
    if any(cell.per_token_s.size for cell in results.cells.values()):
        kinds.append(("latency", latency, "ms per output token, median of requests",
                      "Time per output token after the first", "tables on latency"))  # fmt: skip
    shown = results.concurrencies(temperature)
    few = highlighted(results, temperature)
    for kind, value, label, title, where in kinds:
        name = f"{kind}-t{temperature:g}"
        series = _series(results.names, shown, value)
        canvas = _lines(series, shown, few, label, (WIDTH, HEIGHT), baseline=results.baseline)
        alt = (
            f"{label} over {', '.join(map(str, shown))} requests at once for {len(series)} "
            f"methods. The numbers are in the {where}."
        )
        yield Figure(name, f"{title}, temperature {temperature:g}.", alt, _svg(canvas, name))


def ratio_figure(
    results: Results, temperature: float, names: Sequence[str], value: Value,
    shown: Sequence[int], *, kind: str, label: str, title: str, reference: str, where: str,
) -> Figure:  # fmt: skip
    """Ratios to ``reference`` over load, or of one load beside each other."""
    series = _series(names, shown, value)
    few = highlighted(results, temperature)
    name = f"{kind}-t{temperature:g}"
    drawings = {}
    for stem, size in ((name, WIDE), (f"{name}-narrow", NARROW)):
        with matplotlib.rc_context(SETTINGS):
            drawings[stem] = _svg(
                _lines(series, shown, few, label, size, reference=reference)
                if len(shown) > 1
                else _dots(series, few, label, size, reference),
                stem,
            )
    bars = any(e.has_interval for points in series.values() for e in points.values())
    note = (
        f"Bars: 95 % intervals{', cut off where they leave the plot' * (len(shown) > 1)}."
        if bars
        else "One repeat, so there are no intervals."
    )
    told = "; ".join(f"{name} {', '.join(f'{e.value:.2f} at {c}' for c, e in points.items())}"
                     for name, points in series.items() if name in few)  # fmt: skip
    alt = (
        f"{title}, {len(series)} methods, with a line at 1, {reference}. {told}. All "
        f"numbers are in the {where}."
    )
    load = "by requests at once" if len(shown) > 1 else f"at {shown[0]} at once"
    title = f"{title} {load}, temperature {temperature:g}. {note}"
    return Figure(name, title, alt, *drawings.values())


Value = Callable[[str, int], Estimate | None]
Series = dict[str, dict[int, Estimate]]  # by method and concurrency


def _series(names: Iterable[str], shown: Sequence[int], value: Value) -> Series:
    """Methods that have a value anywhere."""
    found = {
        name: {c: estimate for c in shown if (estimate := value(name, c)) is not None}
        for name in names
    }
    return {name: points for name, points in found.items() if points}


def _lines(
    series: Series, shown: Sequence[int], few: Sequence[str], label: str, size: Size, *,
    baseline: str | None = None, reference: str | None = None,
) -> Canvas:  # fmt: skip
    """A line of each method, named at its end: ``few`` in colour, the others grey.

    ``baseline`` is one of them; ``reference`` is what ratios are to, and the line at 1. Without it
    the axis is logarithmic. Lines stand a little beside each other, so that bars stay visible.
    """
    width, height = size
    canvas = Canvas(figsize=(width, max(height, LABEL * len(series) + 1)), layout="constrained")
    axis = canvas.subplots()
    looks = styles([], baseline, few)
    ends = []
    for i, (name, points) in enumerate(series.items()):
        aside = 2 ** (0.2 * (i - (len(series) - 1) / 2) / max(1, len(series) - 1))
        look = looks.get(name, PLAIN)
        xs, ys = [c * aside for c in points], [e.value for e in points.values()]
        _line(axis, name, xs, list(points.values()), look, bold=name in few)
        lead = reference is not None and name in few[:1]
        text = f"{_shortened(name)} {ys[-1]:.2f}" if lead else _shortened(name)
        ends.append(End(name, xs[-1], ys[-1], look.color, name in few[:1], text))
        # Beside the first point; and, where they do not touch, beside those behind it.
        told = len(xs) - 1 if width > ROOM * len(xs) else min(1, len(xs) - 1)
        for x, y in list(zip(xs, ys, strict=True))[:told] if lead else ():
            axis.annotate(f"{y:.2f}", (x, y), (5, 5), textcoords="offset points",
                          color=look.color, weight="bold", fontsize=10, zorder=4)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(shown)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(axis="x", visible=False)
    axis.set_xlabel("requests at once")
    axis.set_title(label, loc="left")
    if reference is None:
        axis.set_yscale("log")
        _plain_log(axis)
    else:
        _around_one(axis, [e for points in series.values() for e in points.values()], reference)
        ends.append(End(reference, axis.get_xlim()[1], 1.0, INK, bold=False, text=reference))
    _name_ends(canvas, axis, ends)
    return canvas


def _line(
    axis: Axes, name: str, xs: Sequence[float], estimates: Sequence[Estimate], look: Style, *,
    bold: bool,
) -> None:  # fmt: skip
    """One method's, with its intervals; the paler and thinner if it is not ``bold``."""
    line, _, bars = axis.errorbar(
        xs, [e.value for e in estimates], yerr=_bars(estimates), color=look.color,
        marker=look.marker if bold else "", linestyle=look.linestyle if bold else "-",
        linewidth=2.2 if bold else 1.1, elinewidth=1.2 if bold else 0.7,
        capsize=3 if bold else 0, zorder=3 if bold else 2,
    )  # fmt: skip
    line.set_gid(f"line-{slug(name)}")
    for bar in bars:
        bar.set_alpha(1.0 if bold else 0.5)


@dataclass(frozen=True)
class End:
    """Where a line ends, and how its name is written beside it."""

    name: str
    x: float
    y: float
    color: str
    bold: bool
    text: str


def _name_ends(canvas: Canvas, axis: Axes, ends: Sequence[End]) -> None:
    """Names to the right, each as near to its line's end as the others allow, and joined to it."""
    ends = sorted(ends, key=lambda end: end.y)
    right = axis.transAxes
    texts = [
        axis.text(1.035, 0.5, end.text, transform=right, va="center", color=end.color, fontsize=10,
                  weight="bold" if end.bold else "normal", gid=f"label-{slug(end.name)}")
        for end in ends
    ]  # fmt: skip
    canvas.draw_without_rendering()  # the layout leaves room for the longest name
    place = axis.transData + right.inverted()
    heights = [float(place.transform((end.x, end.y))[1]) for end in ends]
    gap = LABEL * canvas.dpi / axis.get_window_extent().height
    for end, text, height in zip(ends, texts, _spread(heights, gap), strict=True):
        text.set_y(height)
        axis.annotate("", xy=(end.x, end.y), xytext=(1.03, height), textcoords=right,
                      annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": end.color, "linewidth": 0.6,
                                  "alpha": 0.7, "shrinkA": 0, "shrinkB": 0})  # fmt: skip


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights in [0, 1], ``gap`` apart, that differ least from ``wanted``, which ascend.

    [0.5, 0.5] and 0.2 -> [0.4, 0.6]. What ascends by less than the gap is what descends once the
    gaps are taken away, so least squares under the order solve it.
    """
    gaps = [gap * i for i in range(len(wanted))]
    fitted = isotonic_regression([w - g for w, g in zip(wanted, gaps, strict=True)]).x
    return [min(max(float(f), 0.0), 1.0 - gaps[-1]) + g for f, g in zip(fitted, gaps, strict=True)]


def _dots(series: Series, few: Sequence[str], label: str, size: Size, reference: str) -> Canvas:
    """A row of each method, the fastest on top."""
    order = sorted(series, key=lambda name: next(iter(series[name].values())).value)
    canvas = Canvas(figsize=(size[0], 0.28 * len(order) + 1.1), layout="constrained")
    axis = canvas.subplots()
    looks = styles([], None, few)
    for row, name in enumerate(order):
        (estimate,) = series[name].values()
        look = looks.get(name, PLAIN)
        line, *_ = axis.errorbar([estimate.value], [row], xerr=_bars([estimate]), color=look.color,
                                 marker=look.marker, markersize=6, elinewidth=1.4, zorder=3,
                                 linestyle="none")  # fmt: skip
        line.set_gid(f"line-{slug(name)}")
    axis.set_yticks(range(len(order)), order)
    for name, text in zip(order, axis.get_yticklabels(), strict=True):
        text.set(gid=f"label-{slug(name)}", color=looks[name].color if name in looks else GREY,
                 weight="bold" if name in few[:1] else "normal")  # fmt: skip
    axis.set_ylim(-0.6, len(order) - 0.4)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(label)
    low, high = axis.get_xlim()
    axis.axvspan(0, 1, color=BAND, zorder=0, linewidth=0)
    axis.axvline(1, color=INK, linewidth=1.2, zorder=1)
    axis.set_xlim(max(0.0, min(low, 0.95)), max(high, 1.05))
    axis.set_title(f"left of 1: slower than {reference}", loc="left", color=LOSS, fontsize=10)
    return canvas


def _around_one(axis: Axes, estimates: Sequence[Estimate], reference: str) -> None:
    """A line at 1, a band of losses below it, and limits that show all points."""
    values = [1.0, *(e.value for e in estimates)]
    low, high = min(values), max(values)
    margin = 0.12 * (high - low) + 0.02
    # Two or three repeats give intervals that would leave the points no room.
    top = max((e.high for e in estimates if e.has_interval), default=high)
    axis.set_ylim(max(0.0, low - margin), min(max(high, top) + margin, high + 4 * margin))
    axis.axhspan(0, 1, color=BAND, zorder=0, linewidth=0)
    axis.axhline(1, color=INK, linewidth=1.2, zorder=1, gid=f"line-{slug(reference)}")
    axis.text(0.01, 0.02, f"slower than {reference}", transform=axis.transAxes, color=LOSS,
              fontsize=10, va="bottom")  # fmt: skip


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
                _svg(_histograms(results, temperature, found), name),
            )


def _histograms(results: Results, temperature: float, found: Mapping[str, Counter[int]]) -> Canvas:
    looks = _looks(results, temperature)
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

"""The report's plots: matplotlib's SVG in colours that the page replaces with its own.

The methods that matter are coloured, blue the headline's; the others are grey. Text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from eval.bench.records import slug
from eval.report.intervals import Estimate

INK, RULE, PAPER, GREY = "#1f2328", "#d0d7de", "#fffffe", "#6a737c"
#: Okabe and Ito's colours, darkened until they are legible as text on white. The headline's first.
COLOURS = ("#0072b2", "#b34d00", "#a34d83")
#: Names of these colours in page.css, which has each for light and for dark mode.
THEME = {INK: "ink", RULE: "rule", PAPER: "paper", GREY: "grey"} | {
    colour: f"line-{i}" for i, colour in enumerate(COLOURS, 1)
}
WIDE, NARROW = (10.2, 4.7), (4.3, 4.2)  # inches; a page shows about 100 pixels each
GAP = 0.19  # inches between the names at the ends of lines
SETTINGS: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 11, "xtick.labelsize": 10, "ytick.labelsize": 10,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": RULE, "figure.facecolor": PAPER, "axes.facecolor": "none",
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "svg.fonttype": "none",
    "axes.titlelocation": "left", "errorbar.capsize": 2.5,
}  # fmt: skip

Size = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """A plot as SVG, drawn for wide and for narrow pages."""

    name: str  # fit for a file's name
    caption: str
    alt: str
    wide: str
    narrow: str


def ratio_chart(
    name: str, series: Mapping[str, Mapping[int, Estimate]], few: Sequence[str], reference: str,
    label: str, caption: str,
) -> Chart:  # fmt: skip
    """Ratios to ``reference`` over load, the methods ``few`` in colour."""
    series = {method: points for method, points in series.items() if points}
    shown = "; ".join(
        f"{method} " + ", ".join(f"{e.value:.2f} at {c}" for c, e in series[method].items())
        for method in few if method in series
    )  # fmt: skip
    bars = any(e.has_interval for points in series.values() for e in points.values())
    note = "Bars: 95 % intervals." if bars else "One repeat, so there are no intervals."
    alt = (
        f"{caption}, {len(series)} methods, with a line at 1, {reference}. {shown}. See the tables"
    )
    with matplotlib.rc_context(SETTINGS):
        drawings = [_svg(_lines(series, few, label, reference, size), f"{name}-{size[0]}")
                    for size in (WIDE, NARROW)]  # fmt: skip
    return Chart(name, f"{caption}. {note}", alt, *drawings)


def pareto_chart(
    name: str, series: Mapping[str, Sequence[tuple[int, float, float]]], few: Sequence[str],
    caption: str,
) -> Chart:  # fmt: skip
    """Tokens/s of a server over tokens/s of each request; ``series`` has load, both, by method."""
    note = "Each point is a load; up and right is better"
    with matplotlib.rc_context(SETTINGS):
        drawings = [_svg(_frontiers(series, few, size), f"{name}-{size[0]}")
                    for size in (WIDE, NARROW)]  # fmt: skip
    alt = f"{caption}, {len(series)} methods. {note}. See the tables"
    return Chart(name, f"{caption}. {note}.", alt, *drawings)


def _frontiers(
    series: Mapping[str, Sequence[tuple[int, float, float]]], few: Sequence[str], size: Size
) -> Figure:
    """A line for each method through its loads; those of the first in ``few`` are named."""
    figure = Figure(figsize=(size[0], size[1] + 0.6))
    axis = figure.subplots()
    for name, points in series.items():
        bold = name in few
        color = COLOURS[few.index(name)] if bold else GREY
        loads, each, every = zip(*points, strict=True)
        width, dot, front = (2.2, 5, 3) if bold else (1.0, 3, 2)
        axis.plot(each, every, color=color, linewidth=width, marker="o", markersize=dot,
                  label=name[:24], zorder=front)  # fmt: skip
        for load, x, y in zip(loads, each, every, strict=True) if name in few[:1] else ():
            axis.annotate(f"{load} at once", (x, y), (5, 5), textcoords="offset points",
                          color=color, fontsize=10)  # fmt: skip
    axis.set(xlabel="tokens/s of a request (median)", title="tokens/s of the server")
    axis.legend(frameon=False)
    return figure


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of error bars; none without an interval."""
    ends = ([e.value - e.low, e.high - e.value] if e.has_interval else [0, 0] for e in estimates)
    return [list(map(float, side)) for side in zip(*ends, strict=True)]


def _lines(
    series: Mapping[str, Mapping[int, Estimate]], few: Sequence[str], label: str, reference: str,
    size: Size,
) -> Figure:  # fmt: skip
    """A line for each method, named at its end; side by side, so that bars stay visible."""
    figure = Figure(figsize=(size[0], max(size[1], GAP * len(series) + 1)))
    axis = figure.subplots()
    ends = [(1.0, reference, INK)]
    for i, (name, points) in enumerate(series.items()):
        bold, lead = name in few, name in few[:1]
        color = COLOURS[few.index(name)] if bold else GREY
        xs = [c * 2 ** (0.2 * ((i + 0.5) / len(series) - 0.5)) for c in points]
        ys, estimates = [e.value for e in points.values()], list(points.values())
        axis.errorbar(xs, ys, yerr=_bars(estimates), color=color, elinewidth=1,
                      linewidth=2.2 if bold else 1.0, marker="o" if bold or len(xs) == 1 else "",
                      zorder=3 if bold else 2)  # fmt: skip
        for x, y in zip(xs[:-1], ys, strict=False) if lead and size == WIDE else ():
            axis.annotate(f"{y:.2f}", (x, y), (5, 5), textcoords="offset points", color=color,
                          weight="bold", fontsize=10)  # fmt: skip
        ends.append((ys[-1], f"{name[:24]} {ys[-1]:.2f}" if lead else name[:24], color))
    axis.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sorted({c for p in series.values() for c in p})))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    every = [1.0, *(e.value for points in series.values() for e in points.values())]
    margin = 0.15 * (max(every) - min(every)) + 0.02  # intervals that reach further are cut off
    axis.set(
        xlabel="requests at once", title=label, ylim=(min(every) - margin, max(every) + margin)
    )
    _name_ends(figure, axis, sorted(ends))
    return figure


def _name_ends(figure: Figure, axis: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names to the right, each as near to its line's end as the others allow."""
    texts = [axis.text(1.04, 0.5, name, transform=axis.transAxes, va="center", color=color,
                       fontsize=10) for _, name, color in ends]  # fmt: skip
    figure.draw_without_rendering()  # so that the layout leaves room for the longest name
    low, high = axis.get_ylim()
    wanted = np.array([(y - low) / (high - low) for y, _, _ in ends])
    steps = GAP * figure.dpi / axis.get_window_extent().height * np.arange(len(ends))
    heights = np.maximum.accumulate(wanted - steps) + steps  # upwards, where they would touch
    heights = np.minimum(heights, 1 - steps[::-1])  # and back below the top
    for y, (_, _, color), text, height in zip(wanted, ends, texts, heights, strict=True):
        text.set_y(height)
        axis.plot([1.0, 1.03], [y, height], transform=axis.transAxes, color=color, linewidth=0.6,
                  clip_on=False)  # fmt: skip


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element whose ids no other figure has; same input, same text."""
    sink = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(sink, format="svg", metadata={"Date": None})
    text = sink.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\1{slug(name)}-", text)


def themed(svg: str, alt: str, kind: str) -> str:
    """``svg`` for a page: its colours are the page's, its size is the page's choice."""
    for colour, name in THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)
    return svg.replace("<svg", f'<svg class="{kind}" role="img" aria-label="{alt}"', 1)

"""What does an evaluation look like: figures of a report, as PNG or SVG by the file's suffix.

Needs matplotlib, which is imported only when something is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_c2t.offline.evaluation import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "os^Dv"

DPI = 150

#: Tokens below which an acceptance rate is noise: its standard error may pass 0.1.
MIN_TOKENS = 25


def reliability_diagram(report: Report, path: Path) -> None:
    """Acceptance over confidence, above the number of tokens per bin."""
    figure = _figure(5, 5.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="calibrated")
    summary = report.summary
    for name, key, ece, style in (
        ("classifier", "classifier", summary.classifier.ece, "o-C0"),
        ("joint probability", "joint", summary.joint.ece, "s--C1"),
    ):
        bins = report.reliability[key]
        scores, shares = [b.mean_score for b in bins], [b.accept_rate for b in bins]
        upper.plot(scores, shares, style, markersize=4, label=f"{name}, ECE {ece:.3f}")
        edges = [b.low for b in bins] + [bins[-1].high]
        lower.stairs([b.tokens for b in bins], edges, color=style[-2:], linestyle=style[1:-2])
    upper.set(
        ylabel="accepted share of tokens",
        title=f"Reliability, n = {summary.tokens} tokens",
    )
    upper.legend()
    lower.set(
        xlabel="confidence or joint probability", ylabel="tokens", yscale="symlog", xlim=(0, 1)
    )
    figure.savefig(path, dpi=DPI)


def acceptance_plot(report: Report, path: Path) -> None:
    """Acceptance over joint probability, one line per depth (C2T, Table 1)."""
    figure = _figure(6, 4.5)
    axes = figure.subplots()
    table = report.acceptance
    middles = [(a + b) / 2 for a, b in zip(table.edges[:-1], table.edges[1:], strict=True)]
    colours = _colours(len(table.depths))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="share = P")
    for j, (depth, colour) in enumerate(zip(table.depths, colours, strict=True)):
        shares = [
            rate[j] if tokens[j] >= MIN_TOKENS else float("nan")
            for rate, tokens in zip(table.accept_rate, table.tokens, strict=True)
        ]
        style = f"{MARKERS[j % len(MARKERS)]}-"
        axes.plot(middles, shares, style, color=colour, markersize=4, label=f"d = {depth}")
    axes.set(
        xlabel="joint probability P",
        ylabel="accepted share of tokens",
        title=f"Acceptance by depth, n = {report.summary.recorded_tokens} tokens\n"
        f"(points of at least {MIN_TOKENS} tokens)",
        xlim=(0, 1),
        ylim=(-0.02, 1.02),
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=DPI)


def _figure(width: float, height: float) -> Figure:
    """A figure of its own, in inches; no global state of pyplot, no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _colours(count: int) -> list[tuple[float, ...]]:
    """From dark to light without the palest, which vanish on paper."""
    from matplotlib import colormaps

    return [tuple(colormaps["viridis"](0.9 * i / max(1, count - 1))) for i in range(count)]

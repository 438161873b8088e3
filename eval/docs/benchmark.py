"""The site's first page of numbers: made of the first table of ``eval/RESULTS.md``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.report.charts import COLOURS, GREY, INK, MARKERS, PAPER, RULE, SETTINGS

HEAD = """# Benchmark

Made of the first table of [all results](RESULTS.md) when this site was built; methods, machines and
drafts beside these, and what was lost, are there. **Nothing was timed on a GPU.**"""
SECTION = "## Time, on the weighted target\n"
#: The line at 1, and what is drawn over it; other rows of the table compare these.
BASELINE, DRAWN = "no speculation, tokens/s", ("fixed 2", "fixed 3", "adaptive", "`auto`")


def benchmark(results: str) -> str:
    """A page for ``results``, the text of that file: conditions, picture, table, reading."""
    section = results.split(SECTION)[1].split("\n## ")[0]
    blocks = section.strip().split("\n\n")
    place = next(i for i, block in enumerate(blocks) if block.startswith("|"))
    loads, rows = parsed(blocks[place])
    picture = f"<figure>\n{chart(loads, {name: rows[name] for name in DRAWN})}\n</figure>"
    parts = [HEAD, picture, *blocks[place : place + 2], "## Conditions", *blocks[:place]]
    return "\n\n".join(parts) + "\n"


def parsed(table: str) -> tuple[list[int], dict[str, list[float]]]:
    """Requests at once, and each row's numbers at them, without intervals."""
    head, _, *lines = (
        [entry.strip() for entry in line.strip("|").split("|")] for line in table.splitlines()
    )
    loads = [int(entry) for entry in head[1:] if entry.isdigit()]
    rows = {
        name: [float(entry.split()[0]) for entry in entries[: len(loads)]]
        for name, *entries in lines
    }
    assert BASELINE in rows
    return loads, rows


def chart(loads: Sequence[int], rows: Mapping[str, Sequence[float]]) -> str:
    """Tokens a second over no speculation, by requests at once; takes the page's ink."""
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": "benchmark"}):
        canvas = Figure(figsize=(6, 4.2), layout="constrained")
        axis = canvas.subplots()
        axis.axhline(1, color=GREY, linewidth=1.4, linestyle=":", label="no speculation")
        for place, (name, values) in enumerate(rows.items()):
            ours = name == "`auto`"
            axis.plot(loads, values, label="--c2t" if ours else name, color=COLOURS[place],
                      marker=MARKERS[place], linewidth=2.6 if ours else 1.4)  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(loads))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda load, _: f"{load:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(xlabel="requests at once", ylabel="tokens/s over no speculation")
        canvas.legend(loc="outside lower center", ncols=3)
        sink = StringIO()
        canvas.savefig(sink, format="svg", metadata={"Date": None})
    svg = sink.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"\n\s*\n", "\n", svg)  # a blank line would end the block of HTML
    alt = escape("Tokens a second over no speculation, by requests at once: the table below")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{alt}"', 1)
    rule = "var(--md-default-fg-color--lightest)"
    return svg.replace(PAPER, "none").replace(RULE, rule).replace(INK, "currentColor")

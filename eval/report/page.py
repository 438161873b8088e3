"""A report's files: one HTML page that needs nothing else, the same as Markdown, and its plots.

The page is the Markdown, rendered, with the plots inline and the tables in boxes that scroll.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markupsafe import Markup

from eval.report.charts import Chart, themed
from sglang_c2t.files import write_texts

FOLDER = Path(__file__).parent
#: Last words of a table's entries, and their class.
MARKS = {"loss": "loss", "slower": "loss", "failed": "bad"}
#: What rendered Markdown lacks for the page, as regular expressions and what replaces them.
CHANGES = {
    r"\[[-+]?[\d.]+, [-+]?[\d.]+\]": r'<span class="interval">\g<0></span>',
    r"<p><strong>([^<]*)</strong></p>\n<table>": r'<div class="scroll" role="region" tabindex="0" '
    r'aria-label="\1"><table><caption><span>\1</span></caption>',
    r"<p>(<strong>[^<]*</strong></p>)": r'<p class="bad">\1',
    "</table>": "</table></div>",
    r"<tr>\n<td([^>]*)>(.*)</td>": r'<tr>\n<th scope="row"\1>\2</th>',
    "<th style": '<th scope="col" style',
}


@dataclass(frozen=True)
class Fold:
    """Details that the page shows when asked to; ``hint`` says what they hold."""

    title: str
    hint: str
    parts: Sequence[str]


@dataclass
class Report:
    """A report: Markdown texts of its answer, folds with details, and the plots shown in them."""

    title: str
    answer: list[str] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)
    charts: dict[str, Chart] = field(default_factory=dict)

    def show(self, chart: Chart) -> str:
        """Keep the plot; its Markdown."""
        self.charts[chart.name] = chart
        return f"![{chart.alt}](plots/{chart.name}.svg)\n\n*{chart.caption}*"

    def write(self, folder: Path) -> list[Path]:
        """Write page, Markdown and plots, all or none; the paths of the first two."""
        environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
        environment.filters["html"] = self._html
        style = (FOLDER / "page.css").read_text(encoding="utf-8")
        page = environment.get_template("page.html.j2").render(style=style, **vars(self))
        details = [text for fold in self.folds for text in (f"## {fold.title}", *fold.parts)]
        text = "\n\n".join((f"# {self.title}", *self.answer, *details)) + "\n"
        (folder / "plots").mkdir(parents=True, exist_ok=True)
        plots = {folder / "plots" / f"{n}.svg": c.wide + "\n" for n, c in self.charts.items()}
        texts = {folder / "report.html": page, folder / "report.md": text}
        write_texts(plots | texts)
        return list(texts)

    def _html(self, text: str) -> Markup:
        html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
        for pattern, replacement in CHANGES.items():
            html = re.sub(pattern, replacement, html)
        for word, kind in MARKS.items():
            html = re.sub(rf"<td([^>]*>[^\n]*\b{word}</td>)", rf'<td class="{kind}"\1', html)
        image = r'<p><img src="plots/(.*?)\.svg" alt=".*?" ?/></p>\n<p><em>(.*)</em></p>'
        return Markup(re.sub(image, lambda m: self._figure(self.charts[m[1]], m[2]), html))

    def _figure(self, chart: Chart, caption: str) -> str:
        drawings = zip((chart.wide, chart.narrow), ("wide", "narrow"), strict=True)
        shown = "".join(themed(svg, escape(chart.alt), kind) for svg, kind in drawings)
        return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>"

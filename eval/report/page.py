"""A report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import re
from html import escape

from eval.report.charts import INK, PAPER, RULE
from eval.report.document import BOLD, Block, Bullets, Document, Entry, Figure, Heading, Table
from eval.report.document import Text as Paragraph
from eval.tables.markdown import bold

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --faint: #59636e;
  --rule: #d0d7de; --band: #f6f8fa; --win: #0a58a8; --loss: #a83c00; --loss-band: #fdebe0;
  --bad-band: #fbe3ee; --bad: #9b1150; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ed; --faint: #a3acb6;
  --rule: #3a424b; --band: #1c2127; --win: #7cc0ff; --loss: #ffab7a; --loss-band: #3b2417;
  --bad-band: #421a2d; --bad: #ff9cc6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 1rem 1rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 1rem 0; }
h2 { font-size: 1.35rem; margin: 2.5rem 0 .8rem; padding-top: .6rem;
  border-top: 2px solid var(--rule); }
h3 { font-size: 1.1rem; margin: 1.8rem 0 .6rem; }
p, li { max-width: 80ch; overflow-wrap: anywhere; }
p.bad { background: var(--bad-band); border-left: 4px solid var(--bad); padding: .5rem .8rem; }
code { font: .86em/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
nav ul { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
a { color: var(--win); }
.scroll { overflow-x: auto; margin: 1.2rem 0 .3rem; }
.scroll:focus-visible { outline: 2px solid var(--win); }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; white-space: nowrap; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap; }
thead th { background: var(--band); vertical-align: bottom; white-space: normal;
  min-width: 5.2rem; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th:first-child { background: var(--band); }
table.words td, table.words thead th { text-align: left; }
table.words td { white-space: normal; min-width: min(20ch, max-content); max-width: 60ch; }
td.best, td.win, td.bad { font-weight: 700; }
td.win { color: var(--win); }
td.loss { color: var(--loss); background: var(--loss-band); }
td.bad { color: var(--bad); background: var(--bad-band); }
.note { color: var(--faint); font-size: .9rem; margin: .2rem 0 1.2rem; }
.plots { display: grid; gap: 1.5rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 1rem 0; max-width: 40rem; break-inside: avoid; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--faint); font-size: .9rem; }
@media print {
  :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --faint: #444444;
    --rule: #bbbbbb; --band: #f3f3f3; --win: #0a58a8; --loss: #a83c00; --loss-band: #fdebe0;
    --bad-band: #fbe3ee; --bad: #9b1150; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  body { font-size: 10pt; }
  table { font-size: 7pt; }
  th, td { padding: .15rem .3rem; white-space: normal; }
  thead th { min-width: 0; }
  .scroll { overflow: visible; }
  th:first-child { position: static; }
  tr { break-inside: avoid; }
  h2, h3, caption { break-after: avoid; }
}
"""


def page(document: Document) -> str:
    """The whole page."""
    headings = [block.text for block in document.blocks
                if isinstance(block, Heading) and block.level == 2]  # fmt: skip
    links = "".join(f'<li><a href="#{_anchor(text)}">{escape(text)}</a></li>' for text in headings)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(document.title)}</h1>\n"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n'
        f"{_blocks(document)}\n</main>\n</body>\n</html>\n"
    )


def _blocks(document: Document) -> str:
    """All blocks; plots that follow each other stand beside each other where there is room."""
    parts = []
    open_plots = False
    for block in document.blocks:
        if isinstance(block, Figure) != open_plots:
            parts.append("</div>" if open_plots else '<div class="plots">')
            open_plots = not open_plots
        parts.append(_block(block))
    return "\n".join([*parts, *(["</div>"] if open_plots else [])])


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f'<h{block.level} id="{_anchor(block.text)}">{_text(block.text)}</h{block.level}>'
    if isinstance(block, Paragraph):
        return f'<p class="{block.mark}">{_text(bold(block.text, block.mark in BOLD))}</p>'
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Figure):
        return _figure(block)
    return _table(block)


def _figure(figure: Figure) -> str:
    """Inline, so that it takes the page's colours; its size is the page's choice."""
    svg = figure.svg.replace(PAPER, "none").replace(RULE, "var(--rule)").replace(INK, "var(--ink)")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    label = f'<svg role="img" aria-label="{escape(figure.alt, quote=True)}"'
    svg = svg.replace("<svg", label, 1)
    return f"<figure>{svg}<figcaption>{_text(figure.title)}</figcaption></figure>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in table.columns)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(map(_entry, entries))}</tr>'
        for first, entries in table.rows
    )
    kind = "" if table.numeric else ' class="words"'
    note = f'\n<p class="note">{_text(table.note)}</p>' if table.note else ""
    # A box that scrolls must be reachable by keyboard and say what it is.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title)}">'
        f"<table{kind}><caption>{_text(table.title)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>{note}"
    )


def _entry(entry: Entry) -> str:
    return f'<td class="{entry.mark}">{escape(entry.text)}</td>'


def _text(text: str) -> str:
    """Escaped, with the two marks a text may hold."""
    text = escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

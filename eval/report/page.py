"""A report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from eval.report.charts import INK, PAPER, RULE
from eval.report.document import BOLD, Block, Bullets, Document, Entry, Figure, Heading, Table
from eval.report.document import Text as Paragraph
from eval.tables.markdown import bold

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page(document: Document) -> str:
    """The whole page."""
    headings = [block.text for block in document.blocks
                if isinstance(block, Heading) and block.level == 2]  # fmt: skip
    links = "".join(f'<li><a href="#{_anchor(text)}">{escape(text)}</a></li>' for text in headings)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
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

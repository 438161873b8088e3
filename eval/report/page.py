"""A report as one HTML page that needs nothing else: no script, no font, no network.

Folds are ``<details>``, so they open without a script, and are open on paper.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from eval.report.charts import PAPER, THEME
from eval.report.document import (
    BOLD,
    Block,
    Bullets,
    Document,
    Entry,
    Figure,
    Fold,
    Heading,
    Headline,
    Table,
)
from eval.report.document import Text as Paragraph
from eval.tables.markdown import bold

INTERVAL = r"\[[-+]?[\d.]+, [-+]?[\d.]+\]"
STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page(document: Document) -> str:
    """The whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(document.title)}</h1>\n"
        f"{_blocks(document.blocks)}\n</main>\n</body>\n</html>\n"
    )


def _blocks(blocks: Sequence[Block]) -> str:
    """All of them; small plots stand beside each other where there is room."""
    parts = []
    for small, group in groupby(blocks, key=lambda b: isinstance(b, Figure) and not b.narrow):
        told = "\n".join(map(_block, group))
        parts.append(f'<div class="plots">{told}</div>' if small else told)
    return "\n".join(parts)


def _block(block: Block) -> str:
    if isinstance(block, Headline):
        return f'<p class="headline">{_text(block.text)}</p>'
    if isinstance(block, Heading):
        return f'<h{block.level} id="{_anchor(block.text)}">{_text(block.text)}</h{block.level}>'
    if isinstance(block, Paragraph):
        return f'<p class="{block.mark}">{_text(bold(block.text, block.mark in BOLD))}</p>'
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Figure):
        return _figure(block)
    if isinstance(block, Fold):
        return _fold(block)
    return _table(block)


def _fold(fold: Fold) -> str:
    return (
        f'<details id="{_anchor(fold.title)}"><summary><h2>{_text(fold.title)}</h2> '
        f'<span class="hint">{_text(fold.hint)}</span></summary>\n'
        f"{_blocks(fold.blocks)}\n</details>"
    )


def _figure(figure: Figure) -> str:
    kind = ' class="main"' if figure.narrow else ""
    drawings = _drawing(figure.svg, figure.alt, "wide" if figure.narrow else "")
    if figure.narrow:
        drawings += _drawing(figure.narrow, figure.alt, "narrow")
    return f"<figure{kind}>{drawings}<figcaption>{_text(figure.title)}</figcaption></figure>"


def _drawing(svg: str, alt: str, kind: str) -> str:
    """Inline, so that it takes the page's colours; its size is the page's choice."""
    svg = svg.replace(PAPER, "none")
    for colour, name in THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    shown = f' class="{kind}"' if kind else ""
    return svg.replace("<svg", f'<svg{shown} role="img" aria-label="{escape(alt)}"', 1)


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
        f"<table{kind}><caption><span>{_text(table.title)}</span></caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>{note}"
    )


def _entry(entry: Entry) -> str:
    """An interval may go to a line of its own, but is not broken; lists may be."""
    text = re.sub(INTERVAL, r'<span class="interval">\g<0></span>', escape(entry.text))
    kind = f"{entry.mark} list" if ", " in re.sub(INTERVAL, "", entry.text) else entry.mark
    return f'<td class="{kind}">{text}</td>'


def _text(text: str) -> str:
    """Escaped, with the two marks a text may hold."""
    text = escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(INTERVAL, r'<span class="interval">\g<0></span>', text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

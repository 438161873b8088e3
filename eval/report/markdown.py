"""A report as Markdown, its plots as files beside it."""

from __future__ import annotations

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
    unfolded,
)
from eval.report.document import Text as Paragraph
from eval.tables.markdown import bold, row, rule

PLOTS = "plots"


def markdown(document: Document) -> str:
    """The whole text; plots are taken from :data:`PLOTS` beside it."""
    blocks = unfolded(document.blocks)
    parts = [f"# {document.title}", *(_block(block) for block in blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Fold):
        return f"## {block.title}"
    if isinstance(block, Headline):
        return block.text
    if isinstance(block, Paragraph):
        return bold(block.text, block.mark in BOLD)
    if isinstance(block, Bullets):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Figure):
        return f"![{block.alt}]({PLOTS}/{block.name}.svg)\n\n*{block.title}*"
    return _table(block)


def _table(table: Table) -> str:
    num_entries = len(table.columns) - 1
    lines = [
        row(table.columns[0], table.columns[1:]),
        rule(num_entries) if table.numeric else rule(0, words=num_entries + 1),
        *(row(_plain(head), [_entry(entry) for entry in entries]) for head, entries in table.rows),
    ]
    note = f"\n\n{table.note}" if table.note else ""
    return f"**{table.title}**\n\n" + "\n".join(lines) + note


def _entry(entry: Entry) -> str:
    return bold(_plain(entry.text), entry.mark in BOLD)


def _plain(text: str) -> str:
    """Signs that would end the cell or mark it up, escaped."""
    for sign in "\\|*_<`":
        text = text.replace(sign, f"\\{sign}")
    return text

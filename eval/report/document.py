"""What a report consists of, before it is HTML or Markdown.

Both renderings walk the same blocks, so they cannot tell different numbers. Texts are plain,
with two marks of Markdown: ``**bold**`` and backquotes for code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """How an entry stands out. Never the only sign: its text says the same in words."""

    PLAIN = "plain"
    BEST = "best"  # bold
    WIN = "win"  # bold, coloured
    TIE = "tie"
    LOSS = "loss"  # coloured
    BAD = "bad"  # a defect


BOLD = frozenset({Mark.BEST, Mark.WIN, Mark.BAD})


@dataclass(frozen=True)
class Entry:
    """One entry of a table."""

    text: str
    mark: Mark = Mark.PLAIN


ABSENT = Entry("-")


@dataclass(frozen=True)
class Headline:
    """What a report comes to, in a sentence."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A heading."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; ``mark`` BAD for what must not be overlooked."""

    text: str
    mark: Mark = Mark.PLAIN


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table: ``columns`` names the first column too; each row is its head and its entries."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Entry]]]
    note: str = ""
    numeric: bool = True  # entries to the right

    def __post_init__(self) -> None:
        for head, entries in self.rows:
            assert len(entries) + 1 == len(self.columns), (self.title, head, entries)


@dataclass(frozen=True)
class Figure:
    """A plot as SVG; ``name`` is unique in its document and fit for a file's name."""

    name: str
    title: str
    alt: str  # for who cannot see it
    svg: str
    narrow: str = ""  # the same, for phones, where one drawing cannot serve all widths


@dataclass(frozen=True)
class Fold:
    """Parts that the page shows when asked to; ``hint`` says what they hold."""

    title: str
    hint: str
    blocks: Sequence[Block]


Block = Headline | Heading | Text | Bullets | Table | Figure | Fold


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    blocks: Sequence[Block]

    @property
    def figures(self) -> list[Figure]:
        """Its plots."""
        return [block for block in unfolded(self.blocks) if isinstance(block, Figure)]


def unfolded(blocks: Iterable[Block]) -> Iterator[Block]:
    """All of them, those within folds behind their folds."""
    for block in blocks:
        yield block
        if isinstance(block, Fold):
            yield from unfolded(block.blocks)

"""The picture of one step: ``python -m eval.docs.diagram`` writes it into the guides.

An SVG with its own paper, so that it is legible on any page, in the colours that the reader's
system asks for. No library: what is drawn are boxes, words and two arrows.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

FILE = Path(__file__).parents[2] / "sglang_c2t" / "guides" / "step.svg"

WIDTH, HEIGHT = 640, 600
LEFT, BOX, GAP = 150, 34, 6

#: Okabe and Ito's, by request; the words on them are white or black by contrast.
STYLE = """
svg { --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --rule: #b6bec7;
  --a: #0072b2; --b: #a84800; --c: #00785a; }
@media (prefers-color-scheme: dark) { svg { --paper: #14171b; --ink: #e6e9ed; --faint: #a3acb6;
  --rule: #565f69; --a: #1f7ab8; --b: #b85f1f; --c: #0f8464; } }
text { font: 16px system-ui, "Liberation Sans", sans-serif; fill: var(--ink); }
.head { font-weight: 700; } .note { fill: var(--faint); font-size: 14px; }
.in { fill: #ffffff; text-anchor: middle; font-weight: 600; font-size: 14px; }
.out { fill: var(--faint); text-anchor: middle; font-size: 14px; }
.paper { fill: var(--paper); stroke: var(--rule); }
.cut { fill: none; stroke: var(--rule); stroke-dasharray: 4 3; stroke-width: 1.5; }
.frame, .arrow { fill: none; stroke: var(--faint); stroke-width: 1.5; }
.tip { fill: var(--faint); }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); }
"""


HEADS = ((44, "1  plan"), (112, "2  draft"), (322, "3  pack"), (438, "4  verify"))
NOTES = (
    (66, "from what survived lately and what steps took: how many layers, how many rows"),
    (134, "SGLang's draft model; of each token P, H and d say how likely it survives"),
    (344, "the rows go to the best drafts of the whole batch, whoever they belong to"),
    (460, "one forward of the target over these rows; each row's token is sampled,"),
    (482, "✓ drafts that equal it are accepted, + is the target's own next token"),
    (576, "what survived, and what the step took"),
)


@dataclass(frozen=True)
class Chain:
    """A request's draft: how many tokens were drafted, verified, and found correct."""

    name: str
    drafted: int
    kept: int
    correct: int


CHAINS = (Chain("a", 4, 4, 3), Chain("b", 4, 0, 0), Chain("c", 4, 2, 2))


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words, from x on or about it, as the class says."""
    return f'<text x="{x:g}" y="{y:g}"{f" class={kind!r}" if kind else ""}>{escape(words)}</text>'


def token(x: float, y: float, words: str, kind: str) -> str:
    """A box of one token; ``cut`` is one that nobody verifies."""
    box = f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{BOX}" rx="5" class={kind!r}/>'
    return box + text(x + BOX / 2, y + 22, words, "out" if kind == "cut" else "in")


def row(y: float, chain: Chain) -> list[str]:
    """A request's root and drafts, those that are verified filled."""
    boxes = [token(LEFT, y, f"{chain.name}0", chain.name)]
    for depth in range(1, chain.drafted + 1):
        kind = chain.name if depth <= chain.kept else "cut"
        boxes.append(token(LEFT + 20 + depth * (BOX + GAP), y, f"{chain.name}{depth}", kind))
    return boxes


def packed(y: float, *, answered: bool) -> list[str]:
    """All rows of the batch, one behind the other; ``answered``: what the target said of each."""
    parts, x = [], float(LEFT)
    for chain in CHAINS:
        for depth in range(chain.kept + 1):
            words = f"{chain.name}{depth}"
            if (
                answered
            ):  # row d answers for draft d + 1; behind the last correct one comes the bonus
                words = "✓" if depth < chain.correct else "+" if depth == chain.correct else "×"
            kind = "cut" if words == "×" else chain.name
            parts.append(token(x, y, words, kind))
            x += BOX + GAP
    width = x - GAP - LEFT + 12
    return [
        f'<rect x="{LEFT - 6}" y="{y - 6:g}" width="{width:g}" height="{BOX + 12}" rx="7" '
        'class="frame"/>',
        *parts,
    ]


def drawing() -> str:
    """The whole file."""
    parts = [text(28, y, head, "head") for y, head in HEADS]
    parts += [text(28, y, note, "note") for y, note in NOTES]
    for place, chain in enumerate(CHAINS):
        y = 150 + place * (BOX + 14)
        parts += [text(28, y + 22, f"request {chain.name}"), *row(y, chain)]
    parts += [text(LEFT + 245, 172, "filled: verified", "note"),
              text(LEFT + 245, 192, "dashed: cut, or not", "note"),
              text(LEFT + 245, 212, "drafted at all", "note")]  # fmt: skip
    parts += packed(364, answered=False)
    parts += packed(504, answered=True)
    parts.append('<path class="arrow" d="M 312 571 H 612 V 40 H 122"/>')
    parts.append('<path class="tip" d="M 112 40 l 12 -6 v 12 z"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="One step: plan, draft, pack, verify, and back to the plan">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>\n'
        f"{body}\n</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
    print(f"wrote {FILE}")

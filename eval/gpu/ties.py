"""Decides whether two greedy decodings agree: equal, or different from a tie of the model on.

bfloat16 matrix products round differently for other batch shapes, so that a server without
speculation does not repeat itself at another batch size. A faulty verification may differ from the
reference anywhere; a correct one only where the reference's two best tokens lie within rounding.
After that place the contexts differ and nothing can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.lossless.greedy import first_difference

#: Nats between the two best tokens. Logits of 16 to 32, the largest of the demo models, are
#: multiples of 1/8 in bfloat16: two of these steps, one for each of the two tokens.
TIE = 0.25


@dataclass(frozen=True)
class Reference:
    """A greedy answer, and its best tokens as (log-probability, token) at every place."""

    tokens: tuple[int, ...]
    top: Sequence[Sequence[tuple[float, int]]]

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Reference:
        """From a /generate reply asked with ``return_logprob`` and ``top_logprobs_num`` 2."""
        top = reply["meta_info"]["output_top_logprobs"]
        return cls(
            tuple(reply["output_ids"]),
            [sorted(((float(p), int(t)) for p, t, *_ in place), reverse=True) for place in top],
        )


def parting(reference: Reference, tokens: Sequence[int]) -> int | None:
    """The first place where the answers differ, ``None`` where they do not."""
    return first_difference(reference.tokens, tokens)


def excused(reference: Reference, tokens: Sequence[int], tie: float = TIE) -> bool:
    """Whether the answers differ, if at all, from a tie of the reference on, in its other token."""
    place = parting(reference, tokens)
    if place is None:
        return True
    if place >= len(tokens) or place >= len(reference.top):
        return False  # one of them just ends: no token was preferred to another
    # Two tokens with equal logits come in either order here: the answer took one of them.
    (best, one), (second, other), *_ = reference.top[place]
    return tokens[place] in (one, other) and best - second <= tie

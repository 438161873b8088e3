"""Measurements of one layer of drafted tokens: the inputs of policies and classifiers.

Pure torch; it knows nothing of SGLang, policies or files.
Legend: B tokens (one per request in a chain; all nodes of a layer in trees), V draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Positions of a token in its layer, which need no measurement.
PLACES = frozenset({"rank", "parent_rank"})

_TOP_ENTROPY = re.compile(r"entropy_top([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class DraftLayer:
    """Drafted tokens of one depth, or of several when ``depth`` is a tensor."""

    depth: int | Tensor
    """1 for the first drafted token (child of the root, which is already committed)."""

    prob: Tensor
    """[B] float32: q(token | prefix), softmax of the draft logits at temperature 1."""

    joint: Tensor
    """[B] float32: product of ``prob`` along the path, this token included."""

    entropy: Tensor
    """[B] float32, nats: entropy of the distribution the token was drawn from."""

    alive: Tensor
    """[B] bool: the chain has not ended before this token. Policies that stop the whole batch need
    it; others may ignore it."""

    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """Measurements that the policy ``needs`` beyond these, by name: those of its own ``measure``,
    and

    ``margin``           [B] float32: log q of the best token less that of the second best
    ``entropy_topM``     [B] float32, nats: the M largest probabilities only (C2T, eq. 7)
    ``confidence``       [B] float32 in [0, 1]: the gate's own, if a kernel has computed it
    ``rank``             [B] float32: rank among its siblings, 0 for the most likely
    ``parent_rank``      [B] float32: its parent's rank among the request's forwarded rows, best
                         first; 0 for children of the root, and in chains
    """

    parent: DraftLayer | None = None
    """The previous layer, row by row; ``None`` for the first, and in trees."""


def known_measurement(name: str) -> bool:
    """Whether :func:`measure` can supply ``name``."""
    return (
        name in {"prob", "entropy", "margin"} | PLACES or _TOP_ENTROPY.fullmatch(name) is not None
    )


def measure(logits: Tensor, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Measure ``prob``, ``entropy`` and the further ``names`` of each draft distribution.

    ``logits`` is [B, V], any float type; -inf entries have probability zero. The drafted token is
    the most likely one.

    For logits [0, 0]: prob 0.5, entropy ln 2, margin 0.
    """
    of_all = floored(logits).log_softmax(dim=-1)
    stats = {"prob": of_all.amax(dim=-1).exp(), "entropy": entropy(of_all)}
    cuts = {name: int(m[1]) for name in names if (m := _TOP_ENTROPY.fullmatch(name))}
    largest = max([*cuts.values(), 2 * ("margin" in names)])
    # One sort serves every measurement that needs order.
    top = of_all.topk(min(largest, of_all.shape[-1]), dim=-1).values if largest else of_all
    for name in names:
        if name == "margin":
            best = top if top.shape[-1] > 1 else top.expand(-1, 2)
            stats[name] = margins(best, 1)[:, 0]
        elif name in PLACES:
            stats[name] = torch.zeros_like(stats["prob"])
        elif name in cuts:
            # The tail is dropped, not spread: the probabilities are not renormalised.
            stats[name] = entropy(top[:, : cuts[name]])
    return stats


# The gate's kernel computes the same statistics (kernels/gate.py).


def floored(logits: Tensor) -> Tensor:
    """[B, V] float32 from logits of any float type; -inf and nan get probability zero."""
    return logits.float().nan_to_num(nan=FLOOR, posinf=torch.inf, neginf=FLOOR)


def entropy(log_probs: Tensor) -> Tensor:
    """[B] nats, of log probabilities [B, any], without renormalisation."""
    # In place: on a CPU the page faults of another [B, V] take several times as long as the sum.
    return -log_probs.exp().mul_(log_probs).sum(dim=-1)


def margins(best: Tensor, topk: int) -> Tensor:
    """[B, K] float32, nats: log q of each of the K best tokens less that of the best *other* one.
    ``best`` [B, >= 2] are log probabilities or logits, descending. The first margin is positive,
    the others negative (0 for a tie); all are within +-50 nats.
    """
    rival = best[:, 1:2]
    if topk > 1:
        rival = torch.cat((rival, best[:, :1].expand(-1, topk - 1)), dim=1)
    return (best[:, :topk] - rival).clamp(-MAX_MARGIN, MAX_MARGIN)


#: Nats; a second-best token of probability zero would make the margin infinite.
MAX_MARGIN = 50.0

#: Replaces -inf. It is finite, so that 0 * log 0 is 0 and not nan.
FLOOR = -1e30


def value_unmeasured(name: str) -> float:
    """Return the value of a token that was not measured, because another server ran its prefill.
    The draft counts as certain, so that the gate keeps it.
    """
    return {"prob": 1.0, "margin": MAX_MARGIN, "confidence": 1.0}.get(name, 0.0)

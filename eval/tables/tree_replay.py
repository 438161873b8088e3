"""Replay a tree policy on recorded trees, without a model.

As :mod:`~sglang_c2t.offline.replay` does for chains. The recording holds EAGLE-2's tree behind each
token of each answer. From a root, :class:`~sglang_c2t.draft.growth.TreeGrowth` grows the policy's
tree, its children looked up instead of drafted; the recorded labels say which path through
it the target takes, and the next root stands behind that path.

Drafts attend to their own ancestors only, so a node measures the same in every tree. Replay is
therefore exact, but for one thing: a policy may expand a node that EAGLE-2 did not. Its children
were never drafted, so it stays a leaf here, and :attr:`TreeOutcome.num_uncovered` counts it. A
recording that verified fewer nodes than were drafted lacks unlikely children as well, so record
with as many draft tokens as there can be nodes: 1 + topk + (num_steps - 1) * topk ** 2.

Legend: R roots, Q requests, n recorded nodes, B roots at a time, W beam rows, K topk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_c2t.classifier.recording import MEASURED, NODE_COLUMNS, Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.draft.growth import PER_NODE, TreeGrowth
from sglang_c2t.draft_layer import PLACES
from sglang_c2t.offline.replay import Outcome, Roots, refuse_unrecorded, walk
from sglang_c2t.policies.base import TreePolicy, TreeShape

#: Grown together: bounds memory to some hundred MB.
ROOTS_AT_ONCE = 2048


@dataclass(frozen=True)
class Forest(Roots):
    """Recorded trees as tables."""

    shape: TreeShape

    nodes: dict[str, Tensor]
    """Measurements by name and ``accept``, [n] or [n, width], in the recording's order."""

    children: Tensor
    """[n + R, K] int32: nodes by parent and rank, -1 where none was recorded. Behind the
    nodes come the roots, in the order of the recording's draft table."""

    @classmethod
    def from_recording(cls, recording: Recording) -> Forest:
        """Raises :class:`ConfigError` unless the recording holds one tree per token."""
        shape = _recorded_shape(recording)
        roots = Roots.from_recording(recording)
        nodes = recording.nodes
        names = sorted(set(nodes) - set(NODE_COLUMNS) | MEASURED | {"prob", "entropy", "accept"})
        parents = recording.parent_rows()
        owner = torch.where(parents < 0, recording.num_nodes + nodes["draft"].long(), parents)
        num_owners = recording.num_nodes + recording.num_drafts
        children = torch.full((num_owners, shape.topk), -1, dtype=torch.int32)
        children[owner, nodes["rank"].long()] = torch.arange(len(owner), dtype=torch.int32)
        measured = {name: nodes[name] for name in names}
        return cls(shape=shape, nodes=measured, children=children, **vars(roots))


@dataclass(frozen=True)
class TreeOutcome(Outcome):
    """Counts per request [Q], float64.

    ``num_proposed`` counts nodes beyond the root. ``num_drafted`` counts layers: the first,
    and each that a living beam was forwarded for; in chains, that is drafts made.
    """

    num_uncovered: Tensor
    """Living beams, roots included, some of whose first K children were not recorded. These
    children count as not drafted. Replay is exact where this is 0."""


def replay_trees(policy: TreePolicy, forest: Forest, shape: TreeShape | None = None) -> TreeOutcome:
    """Serve all requests of ``forest`` with ``policy``.

    Args:
        policy: Any tree policy.
        forest: Recorded trees.
        shape: Of the server to replay, nowhere larger than what was recorded, the default.

    Raises:
        ConfigError: The policy reads what was not recorded, or its trees do not fit.
    """
    shape = forest.shape if shape is None else shape
    for name, wanted, recorded in zip(shape._fields, shape, forest.shape, strict=True):
        if not 1 <= wanted <= recorded:
            raise ConfigError(f"cannot replay {name} {wanted} on trees recorded with {recorded}")
    refuse_unrecorded(policy, {*forest.nodes, *PLACES})
    policy.check(shape)
    rows = torch.arange(len(forest.draft_row)).split(ROOTS_AT_ONCE)
    table = torch.cat([_grown(policy, forest, shape, at) for at in rows], dim=1)  # [4, R]

    return TreeOutcome(
        *walk(forest.first_root, lambda at: table[:, at].unbind(), forest.num_requests)
    )


def _grown(policy: TreePolicy, forest: Forest, shape: TreeShape, roots: Tensor) -> Tensor:
    """[4, B] int64: accepted and verified nodes, drafted layers, uncovered beams at ``roots``."""
    growth = TreeGrowth(policy, shape, len(roots), roots.device)
    names = {"entropy"} | policy.needs - PLACES
    num_drafted, num_uncovered = torch.zeros_like(roots), torch.zeros_like(roots)
    # Tokens are numbers of recorded nodes here.
    rows = len(forest.nodes["accept"]) + forest.draft_row[roots][:, None]  # [B, W]
    for _ in range(shape.num_steps):
        alive = growth.beams.alive
        if not bool(alive.any()):
            break
        children = forest.children[rows][..., : shape.topk].long()  # [B, W, K]
        exists = children >= 0
        children = children.clamp(min=0)
        num_drafted += alive.any(dim=1)
        num_uncovered += (alive & ~exists.all(dim=2)).sum(dim=1)
        measured = {}
        for name in names:
            at = children if name in PER_NODE else children[..., 0]
            measured[name] = forest.nodes[name][at.flatten()].float()
        prob = forest.nodes["prob"][children].masked_fill(~exists, 0.0)
        rows = growth.add(children, prob, measured, exists).tokens
    trees, _ = growth.finish()
    live = trees.parents >= 0
    correct = (forest.nodes["accept"][trees.tokens].bool() & live).sum(dim=1)
    return torch.stack((correct, trees.num_nodes - 1, num_drafted, num_uncovered))


def _recorded_shape(recording: Recording) -> TreeShape:
    """The one shape of all trees of a recording."""
    if recording.topk == 1:
        raise ConfigError(
            "this recording holds chains, trees are replayed on a recording of a server with "
            "--speculative-eagle-topk above 1"
        )
    shapes = {TreeShape(*(o[name] for name in TreeShape._fields)) for o in recording.origins}
    if len(shapes) > 1:
        raise ConfigError(
            f"this recording holds trees of {len(shapes)} shapes (topk, num_steps, "
            f"num_draft_tokens: {', '.join(str(tuple(s)) for s in sorted(shapes))}); replay one"
        )
    return shapes.pop()

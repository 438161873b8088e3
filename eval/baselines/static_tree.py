"""Static tree: one shape for every draft, chosen beforehand.

A node is a path of ranks: [0, 2] is the third most likely child of the most likely child of
the root. The notation of Medusa (arXiv:2401.10774) and EAGLE-1 (arXiv:2401.15077); the
default is EAGLE-1's published tree of 25 drafted nodes, ``mc_sim_7b_63`` (SafeAILab/EAGLE,
choices.py), which needs topk 4, 5 steps and 26 draft tokens.

All nodes rank equal, so where a budget of the batch bites, the deepest go first.

Sampled drafts: safe to drop, because the shape depends on no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_c2t.checks import ConfigError, is_whole, require, shown
from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape

Path = tuple[int, ...]

#: EAGLE-1's tree.
MC_SIM_7B_63: tuple[Path, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class StaticTree:
    """A fixed set of paths."""

    paths: Sequence[Sequence[int]] = MC_SIM_7B_63
    name: ClassVar[str] = "static"
    needs: ClassVar[frozenset[str]] = frozenset()

    # (depth, rows, topk, device) -> table. Filled in a warm-up pass: copying from the host
    # while a CUDA graph is captured fails.
    _tables: dict[tuple[int, int, int, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Reject what is no tree; keep the paths as sorted tuples (JSON has lists)."""
        object.__setattr__(self, "paths", _parsed(self.paths))

    def check(self, shape: TreeShape) -> None:
        """Refuse a server whose trees have no room for all paths, naming the flag to raise."""
        ranks = 1 + max(max(path) for path in self.paths)
        beams = max(len(self._internal(d)) for d in range(self._num_layers))
        needed = {
            "--speculative-eagle-topk": (max(ranks, beams), shape.topk),
            "--speculative-num-steps": (self._num_layers, shape.num_steps),
            "--speculative-num-draft-tokens": (1 + len(self.paths), shape.num_draft_tokens),
        }
        short = [f"{flag} {least}" for flag, (least, given) in needed.items() if given < least]
        if short:
            raise ConfigError(
                f"policy static: its tree of {len(self.paths)} nodes does not fit; "
                f"needs at least {' '.join(short)}"
            )

    def grow(self, layer: TreeLayer) -> Growth:
        """The layer's part of the template, the same for every request."""
        batch, rows, topk = layer.joint.shape
        table = self.template(layer.depth, rows, topk, layer.joint.device)
        key, expand = table[:, None].expand(-1, batch, -1, -1)
        return Growth(key, expand)

    def template(self, depth: int, rows: int, topk: int, device: torch.device) -> Tensor:
        """[2, rows, topk] float32: key and expand of one layer."""
        spot = (depth, rows, topk, device)
        if spot not in self._tables:
            self._tables[spot] = self._table(*spot)
        return self._tables[spot]

    # -- the template ---------------------------------------------------------------------

    @property
    def _num_layers(self) -> int:
        return max(len(path) for path in self.paths)

    def _layer(self, depth: int) -> list[Path]:
        """The template's nodes of one depth, in path order; 0 has the root."""
        return [tuple(p) for p in self.paths if len(p) == depth] if depth else [()]

    def _internal(self, depth: int) -> list[Path]:
        """Those with children: row r of the next forward is the r-th of them."""
        parents = {path[:-1] for path in self._layer(depth + 1)}
        return [path for path in self._layer(depth) if path in parents]

    def _table(self, depth: int, rows: int, topk: int, device: torch.device) -> Tensor:
        """See :meth:`template`."""
        row_of = {path: row for row, path in enumerate(self._internal(depth - 1))}
        key = torch.full((rows, topk), -torch.inf)
        expand = key.clone()
        for path in self._layer(depth):
            key[row_of[path[:-1]], path[-1]] = 1.0
        for place, path in enumerate(self._internal(depth)):
            expand[row_of[path[:-1]], path[-1]] = -float(place)  # path order stays row order
        return torch.stack((key, expand)).to(device)


def _parsed(paths: Any) -> tuple[Path, ...]:
    """The paths, checked and sorted."""
    require(
        isinstance(paths, list | tuple) and len(paths) > 0,
        "policy static: paths",
        "a list of paths such as [[0], [1], [0, 0]]",
        paths,
    )
    for path in paths:
        if not isinstance(path, list | tuple) or not path or not all(map(is_whole, path)):
            raise ConfigError(
                f"policy static: a path is a list of ranks, whole numbers >= 0, got {shown(path)}"
            )
    known = sorted(map(tuple, paths))
    for path, before in zip(known, [None, *known], strict=False):
        if path == before:
            raise ConfigError(f"policy static: path {shown(list(path))} is given twice")
        if path[:-1] and path[:-1] not in known:
            raise ConfigError(
                f"policy static: path {shown(list(path))} needs its ancestor "
                f"{shown(list(path[:-1]))}, which is missing"
            )
    return tuple(known)

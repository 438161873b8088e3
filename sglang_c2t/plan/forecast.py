"""Forecast of the confidences of a chain's or tree's layers before they are drafted.

The planner chooses the depth before the first layer is drafted. It needs the confidence and the
survival of drafts that do not exist yet, and knows only the confidence of the first layer.

Legend: D depths, K bins, B requests, M samples of each, W confidences of a tree's layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.survival import LIMIT, Array, log_odds


class Continuations:
    """For each depth and bin of confidence, the confidences that recently came next.

    A chain continues layer by layer. Each confidence is drawn from those that followed a similar
    one. The draws keep the spread, not only the mean, because a plan gains from the few drafts that
    turn out well.

    A tree's layer holds several confidences, the best first. It continues as layers with a similar
    best confidence did.

    Args:
        max_depth: D.
        width: W of trees, whose layers are [..., d, W]; ``None`` for chains, [..., d].
        num_bins: K, equal steps of the confidence's log odds.
        memory: Continuations kept per bin.
    """

    def __init__(
        self, max_depth: int, *, width: int | None = None, num_bins: int = 8, memory: int = 32
    ) -> None:
        self._max_depth, self._num_bins, self._memory = max_depth, num_bins, memory
        self._layer = () if width is None else (width,)  # shape of one layer
        self._next = np.zeros(((max_depth - 1) * num_bins, memory, *self._layer))
        self._seen = np.zeros((max_depth - 1) * num_bins, dtype=np.int64)

    def observe(self, confidences: Array) -> None:
        """Learn from drafted chains [B, d] or trees [B, d, W]."""
        if confidences.shape[1] < 2:
            return
        bins = self._bins(self._best(confidences[:, :-1]), 1).ravel()
        new = np.bincount(bins, minlength=len(self._seen))
        # numpy sorts small integers by counting.
        order = np.argsort(bins.astype(np.min_scalar_type(len(new))), kind="stable")
        first = np.cumsum(new) - new  # where each bin's group begins in that order
        place = np.empty_like(bins)
        place[order] = np.arange(len(bins)) - first[bins[order]]
        at = (self._seen[bins] + place) % self._memory
        self._next[bins, at] = confidences[:, 1:].reshape(-1, *self._layer)
        self._seen += new

    def drawn(self, first: Array, samples: int) -> Array:
        """Return [B * M, D, ...]: M continuations of each of the ``first`` layers [B] or [B, W]. A
        confidence stays constant where its bin is empty. The draws are the same at each call:
        evenly spread over the remembered continuations.
        """
        batch = len(first)
        chains = np.empty((batch * samples, self._max_depth, *self._layer))
        chains[:, 0] = np.repeat(first, samples, axis=0)
        turn = np.tile(np.arange(samples), batch)
        for depth in range(1, self._max_depth):
            last = chains[:, depth - 1]
            bins = self._bins(self._best(last[:, None]), depth)[:, 0]
            kept = np.minimum(self._seen[bins], self._memory)
            # Each depth permutes the turns, so that a chain does not draw the same quantile at all
            # depths.
            spread = (turn * (2 * depth + 1)) % samples
            pick = (spread * kept // samples + depth) % np.maximum(kept, 1)
            seen = (kept > 0).reshape(-1, *[1] * len(self._layer))
            chains[:, depth] = np.where(seen, self._next[bins, pick], last)
        return chains

    def typical(self) -> Array:
        """Return [K] or [K, W]: for each bin a layer at its middle."""
        odds = LIMIT * (2 * np.arange(self._num_bins) + 1 - self._num_bins) / self._num_bins
        layers = np.zeros((self._num_bins, *self._layer))
        self._best(layers)[:] = 1.0 / (1.0 + np.exp(-odds))
        return layers

    def places(self, layer: Array) -> NDArray[np.int64]:
        """Return [B]: the bin of each ``layer`` [B] or [B, W]."""
        return self._places(self._best(layer))

    def _best(self, confidences: Array) -> Array:
        """Return [...]: the best confidence of layers [..., W]."""
        return confidences[..., 0] if self._layer else confidences

    def _places(self, confidences: Array) -> NDArray[np.int64]:
        step = 2 * LIMIT / self._num_bins
        place = ((log_odds(confidences) + LIMIT) / step).astype(np.int64)
        return np.minimum(np.maximum(place, 0), self._num_bins - 1)

    def _bins(self, confidences: Array, depth: int) -> NDArray[np.int64]:
        """[..., d] table rows for confidences [..., d] at ``depth`` and the depths after it."""
        depths = depth - 1 + np.arange(confidences.shape[1])
        return self._places(confidences) + depths * self._num_bins


class Forecast:
    """Survivals of drafts that do not exist yet, from those that followed similar first drafts.

    It computes ratios to the first layer's survival on first use and keeps them until
    :meth:`refresh`.

    Args:
        seen: The chains or trees that were drafted.
        survivals: Gives the survival [S, d, ...] of confidences [S, d, ...].
        samples: Continuations per draft.
    """

    def __init__(
        self, seen: Continuations, survivals: Callable[[Array], Array], *, samples: int = 32
    ) -> None:
        self._seen, self._survivals, self._samples = seen, survivals, samples
        self._proportions: Array | None = None  # [K, samples, D - 1, ...]

    def refresh(self) -> None:
        """Drop the ratios, because drafts or their values have changed."""
        self._proportions = None

    def __call__(self, first: Array, most: int) -> Array:
        """Return [B * M, D, ...]: survivals of M continuations of each ``first`` layer [B] or [B,
        W]. B * M is about ``most``.
        """
        survival = self._survivals(first[:, None])
        batch = len(first)
        if self._proportions is None:
            self._proportions = self._behind()
        ways = min(max(most // batch, 1), self._samples)
        # If there are few continuations, each draft takes different ones. Otherwise drafts with
        # equal first layers would share their luck.
        turn = np.arange(batch)[:, None] + np.arange(ways) * (self._samples // ways)
        places = self._seen.places(first)[:, None]
        behind = self._proportions[places, turn % self._samples]
        best = survival.reshape(batch, -1).max(axis=1)
        behind = behind * best.reshape(batch, *[1] * (behind.ndim - 1))
        survival = np.broadcast_to(survival[:, None], (batch, ways, *survival.shape[1:]))
        whole = np.concatenate((survival, behind), axis=2)
        return whole.reshape(batch * ways, *whole.shape[2:])

    def _behind(self) -> Array:
        drawn = self._survivals(self._seen.drawn(self._seen.typical(), self._samples))
        best = drawn[:, 0].reshape(len(drawn), -1).max(axis=1)
        drawn = drawn[:, 1:] / best.reshape(len(drawn), *[1] * (drawn.ndim - 1))
        return drawn.reshape(len(drawn) // self._samples, self._samples, *drawn.shape[1:])

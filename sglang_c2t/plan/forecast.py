"""How confidences go on: what a chain's layers will look like before they are drafted.

How deep to draft is decided before the first layer is drafted, so the plan needs to know how sure
the classifier will be of drafts that do not exist yet, and what they will be worth. Known is how
sure it is of the first.

numpy only; knows neither torch nor SGLang.

Legend: D depths, K bins, B requests, M samples of each, W confidences of a tree's layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.survival import LIMIT, Array, log_odds


class Continuations:
    """For each depth and bin of the confidence there, the confidences that lately came next.

    A chain is continued layer by layer, each confidence drawn from those that followed one like
    the last. Spread is kept, not only means: a plan gains from the few drafts that turn out well.

    A layer of a tree is several confidences, the best first, and goes on as layers did whose best
    was like its own.

    Args:
        max_depth: D.
        width: W of trees, whose layers are [..., d, W]; ``None``: chains, [..., d].
        num_bins: K, equal steps of the confidence's log odds.
        memory: Continuations kept of a bin.
    """

    def __init__(
        self, max_depth: int, *, width: int | None = None, num_bins: int = 8, memory: int = 32
    ) -> None:
        self._max_depth, self._num_bins, self._memory = max_depth, num_bins, memory
        self._layer = () if width is None else (width,)  # shape of one
        self._next = np.zeros(((max_depth - 1) * num_bins, memory, *self._layer))
        self._seen = np.zeros((max_depth - 1) * num_bins, dtype=np.int64)

    def observe(self, confidences: Array) -> None:
        """Learn from chains [B, d], or trees [B, d, W], that were drafted."""
        if confidences.shape[1] < 2:
            return
        bins = self._bins(self._best(confidences[:, :-1]), 1).ravel()
        new = np.bincount(bins, minlength=len(self._seen))
        # Small integers are sorted by counting.
        order = np.argsort(bins.astype(np.min_scalar_type(len(new))), kind="stable")
        first = np.cumsum(new) - new  # where each bin's group begins in that order
        place = np.empty_like(bins)
        place[order] = np.arange(len(bins)) - first[bins[order]]
        at = (self._seen[bins] + place) % self._memory
        self._next[bins, at] = confidences[:, 1:].reshape(-1, *self._layer)
        self._seen += new

    def drawn(self, first: Array, samples: int) -> Array:
        """[B * M, D, ...]: chains, or trees, whose first layers are ``first`` [B], or [B, W], each
        continued M ways.

        Where nothing like it was seen, a confidence stays what it was. The draws are the same at
        each call: evenly spread over what is remembered.
        """
        batch = len(first)
        chains = np.empty((batch * samples, self._max_depth, *self._layer))
        chains[:, 0] = np.repeat(first, samples, axis=0)
        turn = np.tile(np.arange(samples), batch)
        for depth in range(1, self._max_depth):
            last = chains[:, depth - 1]
            bins = self._bins(self._best(last[:, None]), depth)[:, 0]
            kept = np.minimum(self._seen[bins], self._memory)
            # Other turns come first at each depth, or every chain would keep its luck.
            spread = (turn * (2 * depth + 1)) % samples
            pick = (spread * kept // samples + depth) % np.maximum(kept, 1)
            seen = (kept > 0).reshape(-1, *[1] * len(self._layer))
            chains[:, depth] = np.where(seen, self._next[bins, pick], last)
        return chains

    def typical(self) -> Array:
        """[K], or [K, W]: for each bin a layer like its middle."""
        odds = LIMIT * (2 * np.arange(self._num_bins) + 1 - self._num_bins) / self._num_bins
        layers = np.zeros((self._num_bins, *self._layer))
        self._best(layers)[:] = 1.0 / (1.0 + np.exp(-odds))
        return layers

    def places(self, layer: Array) -> NDArray[np.int64]:
        """[B]: the bin of each ``layer`` [B], or [B, W]."""
        return self._places(self._best(layer))

    def _best(self, confidences: Array) -> Array:
        """[...]: of layers [..., W]."""
        return confidences[..., 0] if self._layer else confidences

    def _places(self, confidences: Array) -> NDArray[np.int64]:
        step = 2 * LIMIT / self._num_bins
        place = ((log_odds(confidences) + LIMIT) / step).astype(np.int64)
        return np.minimum(np.maximum(place, 0), self._num_bins - 1)

    def _bins(self, confidences: Array, depth: int) -> NDArray[np.int64]:
        """[..., d] rows of the table for confidences [..., d] at ``depth`` and behind."""
        depths = depth - 1 + np.arange(confidences.shape[1])
        return self._places(confidences) + depths * self._num_bins


class Forecast:
    """Survivals of drafts that do not exist yet: what those behind first drafts like these were
    worth in proportion to them, lately.

    Proportions are made when they are first asked for, and stay until :meth:`refresh`.

    Args:
        seen: The chains or trees that were drafted.
        survivals: Gives the survival [S, d, ...] of confidences [S, d, ...].
        samples: Ways in which a draft goes on.
    """

    def __init__(
        self, seen: Continuations, survivals: Callable[[Array], Array], *, samples: int = 32
    ) -> None:
        self._seen, self._survivals, self._samples = seen, survivals, samples
        self._proportions: Array | None = None  # [K, samples, D - 1, ...]

    def refresh(self) -> None:
        """Forget proportions: drafts seen, or their values, have changed."""
        self._proportions = None

    def __call__(self, first: Array, most: int) -> Array:
        """[B * M, D, ...] survival of chains, or trees, whose ``first`` layers [B], or [B, W], are
        known, each continued M ways: about ``most`` in all.
        """
        survival = self._survivals(first[:, None])
        batch = len(first)
        if self._proportions is None:
            self._proportions = self._behind()
        ways = min(max(most // batch, 1), self._samples)
        # Where they are few, each draft has others than the next, or drafts with equal first layers
        # would share their luck.
        turn = np.arange(batch)[:, None] + np.arange(ways) * (self._samples // ways)
        places = self._seen.places(first)[:, None]
        behind = self._proportions[places, turn % self._samples]
        # In proportion to the best of the layer.
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

"""How confidences go on: what a chain's layers will look like before they are drafted.

How deep to draft is decided before the first layer is drafted, so the plan needs to know how sure
the classifier will be of drafts that do not exist yet. Known is how sure it is of those that do.

numpy only; knows neither torch nor SGLang.

Legend: D depths, K bins, B requests, M samples of each, W confidences of a tree's layer.
"""

from __future__ import annotations

import numpy as np

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
        order = np.argsort(bins, kind="stable")
        first = np.searchsorted(bins[order], bins[order])  # where each bin's group begins
        place = np.empty_like(bins)
        place[order] = np.arange(len(bins)) - first
        at = (self._seen[bins] + place) % self._memory
        self._next[bins, at] = confidences[:, 1:].reshape(-1, *self._layer)
        np.add.at(self._seen, bins, 1)

    def drawn(self, confidences: Array, samples: int) -> Array:
        """[B * M, D, ...]: chains [B, k], or trees [B, k, W], of k >= 1 layers, each continued M
        ways.

        Where nothing like it was seen, a confidence stays what it was. The draws are the same at
        each call: evenly spread over what is remembered.
        """
        batch, known = confidences.shape[:2]
        chains = np.empty((batch * samples, self._max_depth, *self._layer))
        chains[:, :known] = np.repeat(confidences, samples, axis=0)
        turn = np.tile(np.arange(samples), batch)
        for depth in range(known, self._max_depth):
            last = chains[:, depth - 1]
            bins = self._bins(self._best(last[:, None]), depth)[:, 0]
            kept = np.minimum(self._seen[bins], self._memory)
            # Other turns come first at each depth, or every chain would keep its luck.
            spread = (turn * (2 * depth + 1)) % samples
            pick = (spread * kept // samples + depth) % np.maximum(kept, 1)
            chains[:, depth] = last
            chains[kept > 0, depth] = self._next[bins, pick][kept > 0]
        return chains

    def _best(self, confidences: Array) -> Array:
        """[..., d]: of each layer of [..., d, W]."""
        return confidences[..., 0] if self._layer else confidences

    def _bins(self, confidences: Array, depth: int) -> np.ndarray:
        """[..., d] rows of the table for confidences [..., d] at ``depth`` and behind."""
        step = 2 * LIMIT / self._num_bins
        place = np.floor((log_odds(confidences) + LIMIT) / step).astype(np.int64)
        depths = depth - 1 + np.arange(confidences.shape[1])
        return np.clip(place, 0, self._num_bins - 1) + depths * self._num_bins

"""By how much more drafts were accepted lately than forecast.

Requests differ, and uniform steps teach no survivals. They do tell how many drafts were accepted in
each layer.

Legend: B requests, S samples of their drafts, D layers, d of them drafted.
"""

from __future__ import annotations

import math

import numpy as np

from sglang_c2t.plan.survival import Array

#: Steps after which an earlier one has a third of its weight, if all of them teach, and if few do.
REMEMBERED = 32
REMEMBERED_STEPS = 512

#: Drafts of a request added to both accepted and forecast ones, because those of few steps are few.
UNSURE = 2.0


class Gains:
    """Ratios of accepted to forecast drafts by layer, each among requests whose draft before it was
    accepted. A layer that was not drafted lately then gains as much as the layers before it.

    A batch with constrained requests teaches nothing for others.
    """

    def __init__(self, max_depth: int) -> None:
        # Without and with constrained requests: drafts of a request accepted and expected by layer.
        self._sums = np.zeros((2, 2, max_depth))
        self._learnt_at = [0, 0]

    def learn(self, step: int, accepted: Array, forecast: Array, *, constrained: bool) -> None:
        """Add a ``step``: the drafts ``accepted`` and ``forecast`` [d] of a request."""
        steps, self._learnt_at[constrained] = step - self._learnt_at[constrained], step
        sums = self._sums[int(constrained)]
        sums *= kept_share(steps, REMEMBERED, REMEMBERED_STEPS)
        reached, before = (np.concatenate(([1.0], each[:-1])) for each in (accepted, forecast))
        sums[0, : len(accepted)] += accepted
        sums[1, : len(accepted)] += reached * forecast / np.maximum(before, 1e-9)

    def of_layers(self, *, constrained: bool) -> Array:
        """Return [D]: factors on the forecast of drafts in each layer."""
        accepted, expected = self._sums[int(constrained)] + UNSURE
        return np.asarray(np.cumprod(accepted / expected))


def gained(survival: Array, factors: Array) -> Array:
    """Return ``survival`` [S, D, ...] times the ``factors`` [D] of its layers, at most the best one
    of the layer before.
    """
    behind = [1] * (survival.ndim - 2)
    found = survival * factors.reshape(-1, *behind)
    best = found.reshape(*found.shape[:2], -1).max(axis=2)
    best = np.minimum.accumulate(np.minimum(best, 1.0), axis=1)
    return np.asarray(np.minimum(found, best.reshape(*best.shape, *behind)))


def kept_share(steps: int, remembered: int, remembered_steps: int) -> float:
    """Return the share of earlier sums that is kept, the last of which is ``steps`` old."""
    return min(1.0 - 1.0 / remembered, math.exp(-steps / remembered_steps))

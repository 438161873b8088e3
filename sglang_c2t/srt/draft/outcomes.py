"""What became of the drafts of a step, on its way to the host, and whom it teaches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.plan import Plan
from sglang_c2t.srt.verify.packing import HostSizes

# B requests


@dataclass(frozen=True)
class Outcome:
    """What became of a step's drafts, on its way to the host."""

    sizes: HostSizes
    """[B, ...]."""

    plan: Plan

    unmeasured: Collection[int]
    """Requests, of the B, whose first draft this gate has not judged."""

    constrained: Collection[int]
    """Requests, of the B, that change the target's distribution."""

    def classes(self, sane: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.bool_], bool]]:
        """[B] bool, who teaches, and whether they are constrained: of each class that is there.

        Nothing is learnt of requests that are not ``sane`` [B].
        """
        teaches = sane.copy()
        teaches[list(self.unmeasured)] = False
        constrained = mask_of(self.constrained, len(sane))
        for kind in (False, True):
            if (rows := teaches & (constrained == kind)).any():
                yield rows, kind


def mask_of(chosen: Collection[int], batch: int) -> NDArray[np.bool_]:
    """[B] bool: true at the ``chosen``."""
    mask = np.zeros(batch, dtype=np.bool_)
    mask[list(chosen)] = True
    return mask

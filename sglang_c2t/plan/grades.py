"""How sure a gate was of drafts, beside what became of them.

numpy only; knows neither torch nor SGLang.

Legend: n drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_c2t.plan.survival import Array, Numbers

#: Bins of equal confidences.
BINS = 20


class Grades:
    """Counts of verified drafts by confidence: how many, their confidences, how many survived.

    Of a calibrated gate the last two are equal; of one that ranks drafts well, survivors are in
    the upper bins, whatever it says of probabilities.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((3, BINS))

    def observe(self, confidence: Array, survived: Numbers) -> None:
        """Drafts with ``confidence`` [n], and which of them survived. What is no probability, as a
        classifier that is broken may say, is left out.
        """
        sane = (confidence >= 0.0) & (confidence <= 1.0)
        confidence, survived = confidence[sane], survived[sane]
        bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        kinds = np.ones(len(bins)), confidence, survived
        self._counts += [np.bincount(bins, weights, minlength=BINS) for weights in kinds]

    def reset(self) -> None:
        """Forget everything."""
        self._counts[:] = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Of each bin, for JSON."""
        names = "drafts", "promised", "survived"
        return dict(zip(names, self._counts.tolist(), strict=True))

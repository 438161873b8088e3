"""What a plan's estimator has learnt, where the drafts are: confidences in, survivals out.

The estimator (:mod:`sglang_c2t.plan.survival`) learns on the host. Its numbers are copied into
device memory that captured graphs keep reading, and applied there to the drafts of each step.

Knows nothing of SGLang.

Legend: B requests, d drafted layers, D of at most, N nodes of a tree, K bins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_c2t.kernels.survival import survival_of_chains, survival_of_nodes
from sglang_c2t.plan.survival import LIMIT, OneSlope, Survival
from sglang_c2t.tree import Trees


class DeviceSurvival:
    """An estimator's twin on a device.

    Args:
        estimator: :class:`Survival` or :class:`OneSlope`.
        device: Where confidences are.
    """

    def __init__(self, estimator: Any, device: torch.device | str) -> None:
        self._of_chains = _TWINS[type(estimator)]
        self._parameters = [
            torch.tensor(np.asarray(values), dtype=torch.float32, device=device)
            for values in estimator.parameters()
        ]

    def refresh(self, estimator: Any) -> None:
        """Take over what the estimator has learnt since, on the current stream."""
        for there, here in zip(self._parameters, estimator.parameters(), strict=True):
            values = torch.tensor(np.asarray(here), dtype=torch.float32)
            if there.is_cuda:  # a copy from pageable memory would wait for the device
                values = values.pin_memory()
            there.copy_(values, non_blocking=True)

    def of_chains(self, confidences: Tensor, *, out: Tensor, kept: Tensor) -> None:
        """Write to ``out`` [B, d] float32 in [0, 1], falling along each row, from as many, and
        these to ``kept``. What is no probability counts as the nearest, nan as 0. No host reads.
        """
        self._of_chains(confidences, *self._parameters, out=out, kept=kept)

    def of_nodes(self, least: Tensor, trees: Trees) -> Tensor:
        """[B, N] float32, falling along each path, from the ``least`` [B, N] confidence on it, by
        :class:`Survival`. What it says of roots and padding means nothing. No host reads.
        """
        (values,) = self._parameters
        return survival_of_nodes(values, least, trees.depth, trees.parents, LIMIT)


def _calibrated(confidences: Tensor, values: Tensor, **to: Tensor) -> None:
    """:meth:`Survival.of_chains`; ``values`` [D, K]."""
    survival_of_chains(values, confidences, LIMIT, **to)


def _one_slope(
    prob: Tensor, slope: Tensor, intercepts: Tensor, *, out: Tensor, kept: Tensor
) -> None:
    """:meth:`OneSlope.of_chains`."""
    odds = torch.logit(prob.nan_to_num(0.0).clamp(0.0, 1.0))
    feature = odds.clamp(-OneSlope.LARGEST, OneSlope.LARGEST)
    accepted = torch.sigmoid(slope * feature + intercepts[: prob.shape[1]])
    out.copy_(accepted.cumprod(dim=1))
    kept.copy_(prob)


_TWINS: dict[type, Callable[..., None]] = {Survival: _calibrated, OneSlope: _one_slope}

"""Device copy of a planner's survival estimator: from confidences to survivals.

The estimator (:mod:`sglang_c2t.plan.survival`) learns on the host. Its parameters are copied to
device memory that captured graphs keep reading, and are applied to the drafts of each step.

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
    """A copy of a survival estimator on a device.

    Args:
        estimator: :class:`Survival` or :class:`OneSlope`.
        device: Device of the confidences.
    """

    def __init__(self, estimator: Any, device: torch.device | str) -> None:
        self._of_chains = _TWINS[type(estimator)]
        self._parameters = [
            torch.tensor(np.asarray(values), dtype=torch.float32, device=device)
            for values in estimator.parameters()
        ]

    def refresh(self, estimator: Any) -> None:
        """Copy the estimator's current parameters, on the current stream."""
        for there, here in zip(self._parameters, estimator.parameters(), strict=True):
            values = torch.tensor(np.asarray(here), dtype=torch.float32)
            if there.is_cuda:  # a copy from pageable memory would wait for the device
                values = values.pin_memory()
            there.copy_(values, non_blocking=True)

    def of_chains(self, confidences: Tensor, *, out: Tensor, kept: Tensor) -> None:
        """Write survivals to ``out`` [B, d] float32 in [0, 1], falling along each row. It writes
        the ``confidences`` [B, d] it used to ``kept``: clipped to [0, 1], nan as 0. No host reads.
        """
        self._of_chains(confidences, *self._parameters, out=out, kept=kept)

    def of_nodes(self, least: Tensor, trees: Trees) -> Tensor:
        """[B, N] float32: survival falling along each path, by :class:`Survival`. ``least`` [B, N]
        is the least confidence on a node's path. Values of roots and padding are undefined. No host
        reads.
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

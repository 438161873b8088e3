"""Range checks of numbers from a file; the planner starts without invalid ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def numbers(
    name: str, values: Any, least: float, most: float, shape: tuple[int, ...] | None = None
) -> NDArray[np.float64]:
    """Return ``values`` as an array; ValueError unless it has this ``shape`` and all numbers are in
    [least, most].
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} holds what are no numbers") from error
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} of shape {array.shape}, not {shape}")
    if not ((array >= least) & (array <= most)).all():  # false for nan
        raise ValueError(f"{name} holds numbers that are not from {least:g} to {most:g}")
    return array

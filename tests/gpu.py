"""Tests that need a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., None])


def gpu(test: Test) -> Test:
    """Mark a test as one for a GPU, skipped where there is none."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))

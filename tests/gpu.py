"""Tests that need a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., None])


def gpu(test: Test) -> Test:
    """Mark a test as one for a GPU, skipped where there is none."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


def at_size(test: Test) -> Test:
    """Mark one that Triton's interpreter would take minutes for, on a device that has no other."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    reason = "for compiled kernels: smaller sizes are interpreted wherever there is no GPU"
    return pytest.mark.skipif(interpreted, reason=reason)(test)

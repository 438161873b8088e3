"""Our packed rows, index arrays and masks are those of SGLang and FlashInfer."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.test_rows import interpret


def test_rows_and_masks_are_those_of_sglang() -> None:
    interpret("sglang_rows_worker")

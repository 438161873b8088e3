"""Our packed rows, index arrays and masks are those of SGLang and FlashInfer."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.processes import run_worker


def test_rows_and_masks_are_those_of_sglang() -> None:
    run_worker("sglang_rows_worker")

"""Our packed rows, masks and trees beside SGLang's own Triton code. Runs without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.processes import run_worker


def test_rows_and_masks_are_those_of_sglang_and_flashinfer() -> None:
    run_worker("sglang_rows_worker")


def test_verify_and_extend_attention_kernels_agree_with_ours() -> None:
    """The greedy verify kernel accepts the same paths; attention of ragged trees is dense."""
    run_worker("triton_worker")

"""Our packed rows, masks and trees beside SGLang's own Triton code. Runs without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.processes import run_worker


def test_rows_and_masks_are_those_of_sglang_and_flashinfer() -> None:
    run_worker("sglang_rows_worker")


def test_the_greedy_verify_kernel_accepts_the_same_paths_as_ours() -> None:
    run_worker("triton_worker", "verify")


def test_the_extend_attention_kernel_sees_ragged_trees_as_dense_attention_does() -> None:
    run_worker("triton_worker", "attention")

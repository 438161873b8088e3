"""No request waits for a kernel to be compiled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.processes import run_worker

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("flashinfer", reason="FlashInfer is not installed")


@pytest.mark.timeout(600)
def test_warm_up_leaves_nothing_to_compile_while_serving() -> None:
    """Whatever the batch: its size, its rows, its tier. Chains and trees."""
    assert run_worker("warm_worker").count("none while serving") == 2


@given(st.integers(1, 300))
def test_warm_up_sizes_hold_every_triton_specialization(most: int) -> None:
    from sglang_c2t.srt.verify.warm_up import sizes_per_triton_specialization

    def kind(number: int) -> tuple[int, bool, bool]:
        block = 1
        while block < number:
            block *= 2
        return block, number == 1, number % 16 == 0

    chosen = sizes_per_triton_specialization(most)
    assert all(1 <= number <= most for number in chosen)
    kinds = [kind(number) for number in chosen]
    assert len(kinds) == len(set(kinds))
    assert {kind(number) for number in range(1, most + 1)} == set(kinds)

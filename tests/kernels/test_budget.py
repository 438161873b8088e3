"""The best drafts of a batch: kernel, twin and loops agree; the kernel compiles for an H100.

The kernel runs in Triton's interpreter (`budget_worker`), and where there is one on a GPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.kernels import budget
from tests.gpu import gpu
from tests.kernels.budget_worker import check
from tests.kernels.hopper import compiled, require_no_spills
from tests.kernels.processes import run_worker


def test_the_interpreted_kernel_does_what_loops_do() -> None:
    run_worker("budget_worker")


@given(st.integers(0, 2**20), st.integers(1, 9), st.integers(1, 6))
def test_the_twin_does_what_loops_do(seed: int, batch: int, layers: int) -> None:
    check(random.Random(seed), batch, layers)


def test_the_example_of_the_docstring() -> None:
    survival = torch.tensor([[0.9, 0.7, 0.1], [0.8, 0.3, 0.2]])
    rows, links = budget.chains_within(survival, 3, 4)
    assert rows.tolist() == [3, 2]
    assert links.tolist() == [[1, 2, -1, -1], [1, -1, -1, -1]]


def test_the_twin_reads_nothing_on_the_host() -> None:
    with FakeTensorMode():
        survival, whole = torch.empty(3, 5), torch.empty(3, dtype=torch.bool)
        rows, links = budget.chains_within(survival, 4, 6, whole)
        assert (rows.shape, links.shape) == ((3,), (3, 6))


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("any_whole", [False, True])
def test_the_kernel_compiles_for_an_h100(size: int, any_whole: bool) -> None:
    kernel = compiled(
        budget._chains_within_kernel, torch.float32, size, torch.bool, torch.int32, torch.int64,
        size, size, size, size, ANY_WHOLE=any_whole, BLOCK_B=256, BLOCK_D=8, BLOCK_N=8,
    )  # fmt: skip
    require_no_spills(kernel)


@gpu
def test_the_kernel_does_what_loops_do_on_a_gpu() -> None:
    rng = random.Random(1)
    for batch in (1, 3, 32, 70, 256):
        check(rng, batch, 5, "cuda")

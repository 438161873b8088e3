"""Choosing, cutting and linking trees: kernels, twins and loops agree; all compile for an H100.

The kernels run in Triton's interpreter (`trees_worker`), and where there is one on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.kernels import beams, budget, outcome, survival, trees
from sglang_c2t.kernels.rows import block_of
from sglang_c2t.plan.survival import LIMIT
from tests.gpu import at_size, gpu
from tests.kernels.hopper import compiled, require_no_spills
from tests.kernels.processes import run_worker
from tests.kernels.trees_worker import CHECKS, KERNELS

INT, FLOAT, BOOL = torch.int64, torch.float32, torch.bool


def test_the_interpreted_kernels_do_what_loops_and_twins_do() -> None:
    run_worker("trees_worker")


@pytest.mark.parametrize("check", CHECKS)
@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(1, 4))
def test_the_twins_do_what_loops_do(
    check: Callable[..., None], seed: int, width: int, size: int
) -> None:
    check(random.Random(seed), width, size)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("block", [8, 64])
def test_the_cut_compiles_for_an_h100(block: int, every: bool) -> None:
    kernel = compiled(
        trees._cut_kernel, *[INT] * 5, BOOL, INT, torch.int32, block, 5 * block, 3 * block, 3,
        ALL=every, BLOCK_N=block,
    )  # fmt: skip
    require_no_spills(kernel)


@pytest.mark.parametrize(("children", "block_d"), [(64, 8), (4, 1)])
def test_beams_compile_for_an_h100(children: int, block_d: int) -> None:
    kernel = compiled(
        beams._beams_kernel, FLOAT, INT, FLOAT, INT, INT, BOOL, FLOAT, INT,
        children, 48, 8, 8, 72, 8, 3, BLOCK=children, BLOCK_D=block_d,
    )  # fmt: skip
    require_no_spills(kernel)


KINDS = ("gated", "planned", "joint", "filtered")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("children", "block_d", "root"), [(64, 8, False), (8, 1, True)])
def test_growth_compiles_for_an_h100(kind: str, children: int, block_d: int, root: bool) -> None:
    kernel = compiled(
        beams._grow_kernel, INT, FLOAT, FLOAT, 64, 5, FLOAT, BOOL, INT, BOOL, FLOAT, INT,
        INT, INT, FLOAT, BOOL, 264, INT, BOOL, FLOAT, INT,
        children, 48, 8, 8, 72, 8, 3, 2, 5, KIND=kind, ROOT=root, ANY_WHOLE=not root,
        BLOCK=children, BLOCK_D=block_d,
    )  # fmt: skip
    require_no_spills(kernel)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("candidates", [64, 264])
def test_the_end_compiles_for_an_h100(candidates: int, every: bool) -> None:
    kernel = compiled(
        trees._finish_kernel, INT, INT, FLOAT, BOOL, torch.int32, INT, INT, FLOAT,
        candidates, 60, 480, DEPTH=6, ALL=every, BLOCK_M=block_of(candidates), BLOCK_N=64,
    )  # fmt: skip
    require_no_spills(kernel)


@pytest.mark.parametrize("any_whole", [False, True])
def test_the_choice_compiles_for_an_h100(any_whole: bool) -> None:
    kernel = compiled(
        budget._nodes_within_kernel, FLOAT, INT, BOOL, BOOL, 5, 5, 5, 24, 3,
        ANY_WHOLE=any_whole, BLOCK_B=64, BLOCK_N=16,
    )  # fmt: skip
    require_no_spills(kernel)


def test_survivals_compile_for_an_h100() -> None:
    constants = {"BINS": 12, "LIMIT": LIMIT, "EPS": survival.EPS}
    chains = compiled(
        survival._chains_kernel, *[FLOAT] * 4, *[5] * 5, **constants, BLOCK_B=survival.CHAINS
    )
    nodes = compiled(
        survival._nodes_kernel, FLOAT, FLOAT, INT, INT, FLOAT, 9, 27, 3, **constants, DEPTH=5,
        BLOCK_N=16,
    )  # fmt: skip
    for kernel in (chains, nodes):
        require_no_spills(kernel)


def test_outcomes_compile_for_an_h100() -> None:
    chains = compiled(
        outcome._chains_kernel, FLOAT, torch.int32, torch.int32, FLOAT, 5, 5, 5, BLOCK_B=32
    )
    trees_ = compiled(
        outcome._trees_kernel, INT, FLOAT, BOOL, torch.int32, torch.int32, FLOAT, 9, 4, 27, 3,
        BLOCK_N=16,
    )  # fmt: skip
    for kernel in (chains, trees_):
        require_no_spills(kernel)


@gpu
@at_size
@pytest.mark.parametrize("check", [*CHECKS, *KERNELS])
def test_the_kernels_do_what_loops_and_twins_do_on_a_gpu(check: Callable[..., None]) -> None:
    rng = random.Random(1)
    for width in (1, 8, 33, 65, 128):
        for size in (1, 3, 70, 256):
            check(rng, width, size, "cuda")

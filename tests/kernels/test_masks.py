"""Packed masks: kernels, twins and loops agree, and FlashInfer would read what trees mean.

The kernels run in Triton's interpreter (`masks_worker`), and where there is one on a GPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.kernels import masks
from tests.gpu import at_size, gpu
from tests.kernels import masks_worker
from tests.kernels.hopper import compiled
from tests.kernels.masks_worker import Forest, check_mask, check_words, random_forest
from tests.kernels.processes import run_worker

INT32, INT64 = torch.int32, torch.int64


def test_interpreted_kernels_do_what_loops_do() -> None:
    run_worker("masks_worker")


@given(st.integers(0, 2**20), st.sampled_from([1, 2, 16, 63, 64, 65, 100]))
def test_words_name_the_ancestors(seed: int, width: int) -> None:
    check_words(random_forest(random.Random(seed), width))


WIDTHS = st.integers(1, 20) | st.sampled_from([63, 64, 65, 100])


@given(st.integers(0, 2**20), WIDTHS, st.sampled_from([-1, 0, 1, 7, 8, 9, 200]))
def test_masks_read_as_flashinfer_reads_them_are_the_dense_ones(
    seed: int, width: int, prefix: int
) -> None:
    check_mask(random_forest(random.Random(seed), width, prefix=prefix))


def test_the_example_of_the_docstring() -> None:
    forest = Forest([[-1, 0]], num_rows=[2], prefixes=[3], slots=1, max_depth=1)
    words = masks.ancestor_words_from_parents(forest.links(), 1)
    num_rows, prefix = forest.ints([2]), forest.ints([3])
    indptr = masks.mask_indptr(prefix, num_rows, 1)
    out = torch.zeros(2, dtype=torch.uint8)
    masks.pack_tree_mask(words, prefix, num_rows, indptr, out)
    assert out.tolist() == [0b11101111, 0b00000011]
    check_mask(forest)


def test_a_batch_without_rows_has_no_mask() -> None:
    check_mask(Forest([[-1], [-1]], num_rows=[0, 0], prefixes=[0, 5], slots=3, max_depth=1))
    check_mask(random_forest(random.Random(0), 3, size=0))


def test_no_capacity_beyond_the_range_of_offsets() -> None:
    assert masks.mask_capacity(2, 1, 5) == 3
    with pytest.raises(ValueError, match="lower the number of rows or the context"):
        masks.mask_capacity(32_768, 64, 2**20)


def test_twins_have_static_shapes_and_read_nothing_on_the_host() -> None:
    """Tensors without values would raise at the first read."""
    with FakeTensorMode():
        lens = torch.empty(3, dtype=INT64)
        words = masks.ancestor_words_from_parents(torch.empty(3, 70, dtype=INT64), 5)
        assert words.shape == (3, 70, 2)
        indptr = masks.mask_indptr(lens, lens, 5)
        assert indptr.shape == (6,)
        masks.pack_tree_mask(words, lens, lens, indptr, torch.empty(99, dtype=torch.uint8))


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("integers", [INT32, INT64])
def test_kernels_compile_for_an_h100(size: int, integers: torch.dtype) -> None:
    """Also where sizes are 1, which the compiler turns into constants."""
    compiled(masks._ancestor_words_kernel, INT64, INT64, size, size, size, BLOCK_N=64)
    compiled(masks._mask_indptr_kernel, integers, integers, INT32, size, size, BLOCK_S=64)
    compiled(
        masks._pack_tree_mask_kernel,
        INT64, integers, integers, INT32, torch.uint8, size, size, size, BLOCK=128,
    )  # fmt: skip


@gpu
@at_size
@pytest.mark.parametrize("width", [1, 2, 16, 63, 64, 65, 100])
def test_kernels_do_what_loops_do_on_a_gpu(width: int) -> None:
    rng = random.Random(width)
    for _ in range(6):
        forest = random_forest(rng, width, "cuda")
        check_words(forest)
        check_mask(forest)
    check_mask(random_forest(rng, min(width, 16), "cuda", size=2, prefix=3000))


@gpu
def test_rows_shorter_than_a_byte_are_packed_on_a_gpu() -> None:
    masks_worker.short_rows("cuda")


@gpu
@at_size
def test_a_long_prefix_is_packed_as_the_twin_packs_it() -> None:
    """32 thousand keys, 64 rows: many blocks of nothing but prefix."""
    forest = random_forest(random.Random(0), 64, "cuda", size=4, prefix=32_768)
    prefixes, num_rows = forest.ints(forest.prefixes), forest.ints([64] * 4)
    words = masks.ancestor_words_from_parents(forest.links(), 64)
    indptr = masks.mask_indptr(prefixes, num_rows, 4)
    found, expected = torch.zeros(2, int(indptr[-1]), device="cuda").byte().unbind()
    masks.pack_tree_mask(words, prefixes, num_rows, indptr, found)
    masks.pack_tree_mask_torch(words, prefixes, num_rows, indptr, expected)
    assert torch.equal(found, expected)

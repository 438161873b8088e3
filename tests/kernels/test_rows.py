"""Packed rows: kernels, twins and loops agree, whatever the lengths; kernels compile for an H100.

The kernels run in Triton's interpreter (`rows_worker`), and where there is one on a GPU.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.kernels import accept, layout, rows
from tests.gpu import at_size, gpu
from tests.kernels import rows_worker
from tests.kernels.hopper import compiled
from tests.kernels.processes import run_worker
from tests.kernels.rows_worker import Batch, check, check_follow_ancestors, random_batch

INT32, INT64 = torch.int32, torch.int64


def test_interpreted_kernels_do_what_loops_do() -> None:
    run_worker("rows_worker")


@given(st.integers(0, 2**20), st.sampled_from([1, 2, 16, 63, 64, 65, 100]))
def test_twins_do_what_loops_do(seed: int, width: int) -> None:
    check(random_batch(random.Random(seed), width))


@given(st.integers(0, 2**20), st.integers(0, 4), st.integers(1, 10), st.integers(1, 8))
def test_ancestors_twin_does_what_loops_do(seed: int, size: int, topk: int, depth: int) -> None:
    check_follow_ancestors(random.Random(seed), size, topk, depth)


def laid_out(lens: torch.Tensor, lay_out: Any = layout.lay_out, **sizes: int) -> layout.Layout:
    """A batch of at most four rows a request, whose tokens and positions are their numbers."""
    batch, device = len(lens), lens.device
    draft = torch.arange(4 * batch, device=device)
    pool = torch.arange(200, dtype=INT32, device=device).view(-1, 20)
    return lay_out(lens, draft, draft, pool, draft[:batch], draft[:batch], **sizes)


def test_the_example_of_the_docstring() -> None:
    found = laid_out(torch.tensor([3, 1]), tokens=6, slots=3, places=4)
    assert found.rows.tolist() == [0, 1, 2, 4, 8, 8]
    assert found.request.tolist() == [0, 0, 0, 1, 0, 0]
    assert found.slot_rows.tolist() == [3, 1, 2]


def test_twins_in_torch_have_static_shapes_and_read_nothing_on_the_host() -> None:
    """Tensors without values would raise at the first read."""
    with FakeTensorMode():
        lens = torch.empty(3, dtype=INT32)
        seq_lens = torch.empty(3, dtype=INT64)
        pool = torch.empty(8, 40, dtype=INT32)
        kv_indptr = rows.indptr(lens, 6, prefix_lens=seq_lens, ghost=1)
        assert kv_indptr.shape == (7,)
        kv_indices = torch.empty(90, dtype=INT32)
        rows.ragged_kv_indices(pool, seq_lens, seq_lens, lens, kv_indptr, kv_indices)
        rows.follow_ancestors(kv_indptr, kv_indices, torch.empty(3, 2, 2, dtype=INT64))


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("integers", [INT32, INT64])
def test_kernels_compile_for_an_h100(size: int, integers: torch.dtype) -> None:
    """Also where sizes are 1, which the compiler turns into constants."""
    compiled(
        layout._lay_out_kernel, integers, INT64, INT64, INT32, integers, integers,
        INT64, INT32, INT64, *[size] * 9, BLOCK_S=32, BLOCK_N=8,
    )  # fmt: skip
    for trees in (False, True):
        compiled(
            accept._accept_kernel, INT64, INT64, INT32, INT32, INT64, INT64,
            *[INT32] * 3, *[INT64] * 2, *[size] * 5, TREES=trees, BLOCK_N=8,
        )  # fmt: skip
    compiled(rows._chain_links_kernel, integers, INT32, INT64, size, BLOCK_N=8)
    for dtype in (torch.bfloat16, torch.float32, INT32):
        sizes = [size] * 5
        compiled(
            rows._scatter_rows_kernel, dtype, integers, dtype, *sizes, BLOCK_B=256, BLOCK_W=4096
        )
    for has_prefix in (False, True):
        compiled(
            rows._indptr_kernel, integers, INT64, INT32, size, size, size,
            HAS_PREFIX=has_prefix, BLOCK_S=64,
        )  # fmt: skip
    compiled(
        rows._kv_indices_kernel, INT32, integers, integers, INT32, INT32, INT32, size, size,
        BLOCK=1024,
    )  # fmt: skip


@pytest.mark.parametrize(("topk", "depth"), [(1, 1), (4, 5), (10, 8), (16, 64)])
def test_all_ancestors_are_read_before_any_is_written(topk: int, depth: int) -> None:
    """In the machine code: loads, then a barrier of the thread block, then stores."""
    kernel = compiled(
        rows._follow_ancestors_kernel, INT32, INT32, INT64, topk, depth,
        BLOCK_K=rows.block_of(topk), BLOCK_D=rows.block_of(depth),
    )  # fmt: skip
    steps = re.findall(r"ld\.global|bar\.sync|st\.global", kernel.asm["ptx"])
    last_load = max(i for i, step in enumerate(steps) if step == "ld.global")
    first_store = steps.index("st.global")
    assert "bar.sync" in steps[last_load:first_store], steps


@gpu
@at_size
@pytest.mark.parametrize("width", [1, 2, 16, 63, 64, 65, 100])
def test_kernels_do_what_loops_do_on_a_gpu(width: int) -> None:
    rng = random.Random(width)
    for _ in range(8):
        check(random_batch(rng, width, "cuda"))


@gpu
@at_size
def test_wide_tables_and_long_prefixes_on_a_gpu() -> None:
    rng = random.Random(0)
    for columns in (4096, 4099, 12345):
        batch = random_batch(rng, 4, "cuda", size=5)
        rows_worker.check_scatter(batch, columns, torch.bfloat16)
    lens, prefixes = [3, 5], [200_000, 2]
    rows_worker.check_kv_indices(Batch(lens, prefixes, 5, 2, 8, device="cuda"))


@gpu
@at_size
def test_ancestors_are_followed_on_a_gpu_time_and_again() -> None:
    """Many warps a block: a store that overtakes a load would show."""
    rng = random.Random(0)
    for _ in range(50):
        check_follow_ancestors(rng, size=32, topk=16, depth=16, device="cuda")


@gpu
def test_a_replayed_graph_packs_other_lengths() -> None:
    """Captured once with all rows, replayed with every batch that fits."""
    rng = random.Random(0)
    lens = torch.full((4,), 4, dtype=INT32, device="cuda")

    def run(lay_out: Any, scatter: Any, *out: Any) -> tuple[layout.Layout, torch.Tensor]:
        found = laid_out(lens, lay_out, tokens=16, slots=6, places=5)
        return found, scatter(found.input_ids[:, None], lens, 4, *out)

    run(layout.lay_out, rows.scatter_rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, strided = run(layout.lay_out, rows.scatter_rows)
    for _ in range(20):
        lens.copy_(torch.tensor([rng.randint(0, 4) for _ in range(4)]))
        graph.replay()
        expected, table = run(
            layout.lay_out_numpy, rows.scatter_rows_torch, torch.empty_like(strided)
        )
        for values, wanted in zip(found, expected, strict=True):
            assert torch.equal(values, wanted)
        assert torch.equal(strided, table)

"""Packed rows: kernels, twins and loops agree, whatever the lengths; kernels compile for an H100.

The kernels run in Triton's interpreter, where a process of its own calls `main`, and where there
is one on a GPU.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.kernels import accept, layout, rows
from tests.gpu import at_size, gpu
from tests.kernels.hopper import compiled
from tests.kernels.processes import run_worker

UNTOUCHED = -7


@dataclass
class Batch:
    """B ragged requests: how many rows each verifies behind how many committed tokens."""

    lens: list[int]
    prefixes: list[int]
    width: int
    slots: int
    num_tokens: int
    device: str = "cpu"
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def size(self) -> int:
        return len(self.lens)

    @property
    def num_rows(self) -> int:
        return self.size * self.width

    def live(self) -> list[tuple[int, int]]:
        """(request, row of it) at each packed place that is not padding."""
        return [(b, j) for b, length in enumerate(self.lens) for j in range(length)]

    def ints(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def table(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return torch.randint(1, 100, shape, generator=generator).to(self.device, dtype)

    def pool(self) -> tuple[Tensor, Tensor]:
        """(req_to_token [pool, context], req_pool_indices [B]), slots in no order."""
        context = max(self.prefixes, default=0) + self.width + 3
        table = self.table(self.size + 2, context, dtype=torch.int32)
        return table, self.ints(self.rng.sample(range(self.size + 2), self.size))


def random_batch(rng: random.Random, width: int, device: str = "cpu", size: int = -1) -> Batch:
    size = rng.choice([0, 1, 2, 3, 7]) if size < 0 else size
    kind = rng.choice(["ragged", "one", "full"])
    lens = {
        "ragged": [rng.randint(0, width) for _ in range(size)],  # also empty ones
        "one": [1] * size,
        "full": [width] * size,
    }[kind]
    return Batch(
        lens=lens,
        prefixes=[rng.choice([0, 1, rng.randint(0, 60)]) for _ in lens],
        width=width,
        slots=size + rng.choice([0, 1, 5]),
        num_tokens=max(sum(lens) + rng.choice([0, 1, 40]), 1),
        device=device,
        rng=rng,
    )


def same(found: Tensor, expected: list) -> None:
    assert found.tolist() == expected, (found.tolist(), expected)


def check_layout(batch: Batch) -> None:
    """Three gathers, zero behind; whose rows they are; the window; and every row in some slot.

    The request table may end before a request's last row.
    """
    pool, slots = batch.pool()
    pool = pool[:, : pool.shape[1] - batch.rng.choice([0, batch.rng.randint(0, batch.width + 2)])]
    draft, positions = (batch.table(batch.num_rows, dtype=torch.int64) for _ in range(2))
    left = batch.num_tokens - sum(batch.lens)
    strided = [b * batch.width + j for b, j in batch.live()]
    places = batch.width + batch.rng.choice([0, 2])

    def kv_slot(b: int, j: int) -> int:
        place = batch.prefixes[b] + j
        return pool[slots[b], place].item() if place < pool.shape[1] else 0

    spare = batch.slots - batch.size
    each = batch.lens + [left // spare + (i < left % spare) for i in range(spare)]
    if batch.size and not spare:
        each = [*each[:-1], each[-1] + left]
    keys = [n + before for n, before in zip(each, batch.prefixes + [1] * spare, strict=True)]
    padding = [0] * left
    expected = layout.Layout(
        *(
            [draft[row].item() for row in strided] + padding,
            [positions[row].item() for row in strided] + padding,
            [kv_slot(b, j) for b, j in batch.live()] + padding,
            strided + [batch.num_rows] * left,
            [b for b, _ in batch.live()] + padding,
            [[kv_slot(b, j) for j in range(places)] for b in range(batch.size)],
            each,
            [sum(each[:i]) for i in range(batch.slots + 1)],
            keys,
            [sum(keys[:i]) for i in range(batch.slots + 1)],
        )
    )
    for lay_out in (layout.lay_out, layout.lay_out_numpy):
        for of_lens in (torch.int32, torch.int64):
            found = lay_out(
                batch.ints(batch.lens, of_lens), draft, positions, pool, slots,
                batch.ints(batch.prefixes),
                tokens=batch.num_tokens, slots=batch.slots, places=places,
            )  # fmt: skip
            for name, values in zip(found._fields, found, strict=True):
                same(values, getattr(expected, name))
                assert values.dtype == (torch.int32 if "slot_" in name or "_starts" in name
                                        else torch.int64), name  # fmt: skip


def check_accept(batch: Batch, most: int, *, trees: bool) -> None:
    """A walk from the root, to the first child that is wanted; where its nodes were written."""
    batch.lens = [max(n, 1) for n in batch.lens]
    rng, width, tokens = batch.rng, batch.width, 3  # so few that a path goes on
    parents = [[-1, *(rng.randrange(n) if n < length else -1 for n in range(1, width))]
               for length in batch.lens]  # fmt: skip
    drafts = [[rng.randrange(tokens) for _ in range(width)] for _ in batch.lens]
    wanted = [rng.randrange(tokens) for _ in batch.live()]
    longest = most + rng.choice([0, 2])
    starts = [sum(batch.lens[:b]) for b in range(batch.size + 1)]
    window = batch.table(batch.size, max(width, longest) + 1, dtype=torch.int64)
    predict = [0] * batch.num_rows
    lens, index, written, front = [], [], [], []
    for b, length in enumerate(batch.lens):
        path = [0]
        while len(path) < most:
            here = path[-1]
            below = [n for n in range(1, length) if (parents[b][n] if trees else n - 1) == here]
            next_ = [n for n in below if drafts[b][n] == wanted[starts[b] + here]]
            if not next_:
                break
            path.append(next_[0])
        first = starts[b] if trees else b * width
        for n in path:
            predict[first + n] = wanted[starts[b] + n]
        behind = longest - len(path)
        lens.append(len(path))
        index.append([first + n for n in path] + [-1] * behind)
        written += [window[b, n].item() for n in path] + [0] * behind
        front += [window[b, j].item() for j in range(len(path))] + [0] * behind
    for accept_paths in (accept.accept_paths, accept.accept_paths_numpy):
        found = accept_paths(
            batch.ints(wanted), batch.ints([t for row in drafts for t in row]),
            batch.ints(batch.lens, torch.int32), batch.ints(starts, torch.int32), window,
            batch.ints([n for row in parents for n in row]).view(-1, width) if trees else None,
            longest=longest, most=most,
        )  # fmt: skip
        for values, told in zip(found, (predict, lens, index, written, front), strict=True):
            same(values, told)
        assert found.predict.dtype == found.accept_index.dtype == torch.int32
        assert found.accept_lens.dtype == torch.int32


def check_links(batch: Batch) -> None:
    """The row behind each, none behind the last; lengths are copied."""
    lens = batch.ints([max(n, 1) for n in batch.lens], batch.rng.choice([torch.int32, torch.int64]))
    expected = [[j + 1 if j + 1 < n else -1 for j in range(batch.width)] for n in lens.tolist()]
    for chain_links in (rows.chain_links, rows.chain_links_torch):
        copied, links = chain_links(lens, batch.width)
        same(links, expected)
        same(copied, lens.tolist())
        assert (copied.dtype, links.dtype) == (torch.int32, torch.int64)
        assert not batch.size or copied.data_ptr() != lens.data_ptr()


def check_scatter(batch: Batch, columns: int, dtype: torch.dtype) -> None:
    """Rows come back to their places, zeros elsewhere."""
    packed = batch.table(batch.num_tokens, columns, dtype=dtype)
    packed[sum(batch.lens) :] = 101  # padding, which nothing may read
    if dtype.is_floating_point:
        packed[sum(batch.lens) :] = torch.nan
    expected = [[0] * columns for _ in range(batch.num_rows)]
    for place, (b, j) in enumerate(batch.live()):
        expected[b * batch.width + j] = packed[place].tolist()
    lens = batch.ints(batch.lens, torch.int32)
    for function in (rows.scatter_rows, rows.scatter_rows_torch):
        out = packed.new_full((batch.num_rows + 1, columns), UNTOUCHED)
        same(function(packed, lens, batch.width, out), expected)
        same(out[-1], [UNTOUCHED] * columns)
    same(rows.scatter_rows(packed, lens, batch.width), expected)


def check_indptr(batch: Batch) -> None:
    """Starts of all slots, with and without a prefix, ghosts of any length behind."""
    lens = batch.ints(batch.lens, torch.int32)
    for ghost in (0, 1, 3):
        for prefix in (None, batch.ints(batch.prefixes)):
            of_prefix = [0] * batch.size if prefix is None else batch.prefixes
            expected = [0]
            for length, before in zip(batch.lens, of_prefix, strict=True):
                expected.append(expected[-1] + length + before)
            for _ in range(batch.slots - batch.size):
                expected.append(expected[-1] + ghost)
            for function in (rows.indptr, rows.indptr_torch):
                out = batch.ints([UNTOUCHED] * (batch.slots + 2), torch.int32)
                same(
                    function(lens, batch.slots, prefix_lens=prefix, ghost=ghost, out=out), expected
                )
                same(out, [*expected, UNTOUCHED])
            same(rows.indptr(lens, batch.slots, prefix_lens=prefix, ghost=ghost), expected)


def check_kv_indices(batch: Batch, spare: int = 5) -> None:
    """Prefix and own slots of each request; behind them the buffer stays as it was."""
    pool, slots = batch.pool()
    lens, prefixes = batch.ints(batch.lens, torch.int32), batch.ints(batch.prefixes)
    indptr = rows.indptr(lens, batch.slots, prefix_lens=prefixes, ghost=1)
    expected = [
        pool[slots[b], position].item()
        for b, (length, prefix) in enumerate(zip(batch.lens, batch.prefixes, strict=True))
        for position in range(prefix + length)
    ]
    for function in (rows.ragged_kv_indices, rows.ragged_kv_indices_torch):
        out = batch.ints([UNTOUCHED] * (len(expected) + spare), torch.int32)
        function(pool, slots, prefixes, lens, indptr, out)
        same(out, expected + [UNTOUCHED] * spare)
        # A buffer that is too short is filled, never overrun.
        fits = len(expected) // 2
        out.fill_(UNTOUCHED)
        function(pool, slots, prefixes, lens, indptr, out[:fits])
        same(out, expected[:fits] + [UNTOUCHED] * (len(out) - fits))


def check_follow_ancestors(
    rng: random.Random, size: int, topk: int, depth: int, device: str = "cpu"
) -> None:
    """Each row ends with the slots of its ancestors' rows, one per step; the rest stays."""
    own = [[[1000 * b + 100 * k + j for j in range(depth)] for k in range(topk)]
           for b in range(size)]  # fmt: skip
    ancestors = [[[rng.randrange(topk) for _ in range(depth)] for _ in range(topk)]
                 for _ in range(size)]  # fmt: skip
    prefix = [[-1 - rng.randrange(9) for _ in range(rng.randrange(4))] for _ in range(size)]
    ends, before, after = [0], [], []
    for b in range(size):
        for k in range(topk):
            before += prefix[b] + own[b][k]
            after += prefix[b] + [own[b][row][j] for j, row in enumerate(ancestors[b][k])]
            ends.append(len(before))
    table = torch.tensor(ancestors, dtype=torch.int64, device=device).view(size, topk, depth)
    for function in (rows.follow_ancestors, rows.follow_ancestors_torch):
        indices = torch.tensor([*before, UNTOUCHED], dtype=torch.int32, device=device)
        function(torch.tensor([*ends, 0], dtype=torch.int32, device=device), indices, table)
        same(indices, [*after, UNTOUCHED])


def check(batch: Batch) -> None:
    """Everything that takes a ragged batch."""
    check_layout(batch)
    check_links(batch)
    check_indptr(batch)
    check_kv_indices(batch)
    columns = batch.rng.choice([1, 5, 64])
    dtype = batch.rng.choice([torch.bfloat16, torch.float32, torch.int32])
    check_scatter(batch, columns, dtype)
    for trees in (False, True):
        check_accept(batch, batch.rng.choice([1, 2, 5]), trees=trees)


def main() -> None:
    """Random batches of every width, blocks of more than one piece, and all draft shapes."""
    rng = random.Random(0)
    rows.FULL_GRID = 8  # the interpreter runs one block after the other
    for width in (1, 2, 16, 63, 64, 65, 100):
        for size in (1, 3) if width > 16 else (0, 1, 2, 7):
            check(random_batch(rng, width, size=size))
    # More columns than a block, and more keys than a round of all blocks of a request.
    wide = random_batch(rng, 2, size=2)
    check_scatter(wide, 4099, torch.bfloat16)
    check_kv_indices(Batch([3, 5], [9000, 2], width=5, slots=2, num_tokens=8, rng=rng))
    for size in (0, 1, 3):
        for topk in (1, 4, 5, 10):
            check_follow_ancestors(rng, size, topk, depth=rng.choice([1, 2, 5, 8]))


INT32, INT64 = torch.int32, torch.int64


def test_interpreted_kernels_do_what_loops_do() -> None:
    run_worker("test_rows")


@given(st.integers(0, 2**20), st.sampled_from([1, 2, 16, 63, 64, 65, 100]))
def test_twins_do_what_loops_do(seed: int, width: int) -> None:
    check(random_batch(random.Random(seed), width))


@given(st.integers(0, 2**20), st.integers(0, 4), st.integers(1, 10), st.integers(1, 8))
def test_ancestors_twin_does_what_loops_do(seed: int, size: int, topk: int, depth: int) -> None:
    check_follow_ancestors(random.Random(seed), size, topk, depth)


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
        check_scatter(batch, columns, torch.bfloat16)
    lens, prefixes = [3, 5], [200_000, 2]
    check_kv_indices(Batch(lens, prefixes, 5, 2, 8, device="cuda"))


@gpu
@at_size
def test_ancestors_are_followed_on_a_gpu_time_and_again() -> None:
    """Many warps a block: a store that overtakes a load would show."""
    rng = random.Random(0)
    for _ in range(50):
        check_follow_ancestors(rng, size=32, topk=16, depth=16, device="cuda")

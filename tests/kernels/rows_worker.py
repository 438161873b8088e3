"""Packed-row kernels against their twins and against loops, on any device.

`test_rows` runs `main` by Triton's interpreter, in a process of its own, and calls the checks by
itself for the twins, and for the kernels where there is a GPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_c2t.kernels import rows

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


def check_packed_rows(batch: Batch) -> None:
    """Live rows in order; padding is the sink, of request 0, and not valid."""
    padding = batch.num_tokens - sum(batch.lens)
    arguments = batch.ints(batch.lens, torch.int32), batch.width, batch.num_tokens
    for function in (rows.packed_rows, rows.packed_rows_torch):
        found = function(*arguments)
        same(
            found.rows, [b * batch.width + j for b, j in batch.live()] + [batch.num_rows] * padding
        )
        same(found.request, [b for b, _ in batch.live()] + [0] * padding)
        same(found.valid, [True] * sum(batch.lens) + [False] * padding)
        assert found.rows.dtype == found.request.dtype == torch.int64


def check_pack_inputs(batch: Batch) -> None:
    """Three gathers, zero behind; buffers beyond the tier stay as they were.

    The request table may end before a request's last row.
    """
    pool, slots = batch.pool()
    pool = pool[:, : pool.shape[1] - batch.rng.choice([0, batch.rng.randint(0, batch.width + 2)])]
    draft, positions = (batch.table(batch.num_rows, dtype=torch.int64) for _ in range(2))
    padding = [0] * (batch.num_tokens - sum(batch.lens))
    strided = [b * batch.width + j for b, j in batch.live()]
    expected = (
        [draft[row].item() for row in strided] + padding,
        [positions[row].item() for row in strided] + padding,
        [
            pool[slots[b], place].item() if (place := batch.prefixes[b] + j) < pool.shape[1] else 0
            for b, j in batch.live()
        ]
        + padding,
    )
    arguments = (
        batch.ints(batch.lens), draft, positions, pool, slots, batch.ints(batch.prefixes),
        batch.num_tokens,
    )  # fmt: skip
    for function in (rows.pack_inputs, rows.pack_inputs_torch):
        # As in a CUDA graph: buffers of the largest tier, KV slots of either integer type.
        buffers = rows.PackedInputs(
            *(
                torch.full((batch.num_tokens + 2,), UNTOUCHED, dtype=dtype, device=batch.device)
                for dtype in (torch.int64, torch.int64, torch.int32)
            )
        )
        packed = function(*arguments, buffers)
        for values, buffer, wanted in zip(packed, buffers, expected, strict=True):
            same(values, wanted)
            same(buffer, [*wanted, UNTOUCHED, UNTOUCHED])
    for values, wanted in zip(rows.pack_inputs(*arguments), expected, strict=True):
        same(values, wanted)


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
        function(
            torch.tensor([*ends, 0], dtype=torch.int32, device=device),
            indices,
            table,
        )
        same(indices, [*after, UNTOUCHED])


def check_window(batch: Batch) -> None:
    """Slots behind each prefix, 0 where the table has ended; and those of accepted paths in it."""
    pool, slots = batch.pool()
    pool = pool[:, : max(pool.shape[1] - batch.rng.choice([0, 3, 5]), 1)]
    width = batch.width + batch.rng.choice([0, 2])
    expected = [
        [
            pool[slots[b], place].item() if place < pool.shape[1] else 0
            for place in range(batch.prefixes[b], batch.prefixes[b] + width)
        ]
        for b in range(batch.size)
    ]
    for function in (rows.verify_window, rows.verify_window_torch):
        window = function(pool, slots, batch.ints(batch.prefixes), width)
        assert window.dtype == torch.int64
        same(window, expected)
    if batch.size:
        check_paths(batch, window)


def check_paths(batch: Batch, window: Tensor) -> None:
    """Rows of a path, the slots that they were written to, and those in front."""
    longest = batch.rng.randint(1, batch.width)
    strided = [b * batch.width + j for b, j in batch.live()]
    index, lens, told = [], [], []
    for b in range(batch.size):
        own = [row for row, (of, _) in enumerate(batch.live()) if of == b]
        path = sorted(batch.rng.sample(own, batch.rng.randint(0, min(len(own), longest))))
        behind = longest - len(path)
        index.append(path + [-1] * behind)
        lens.append(len(path))
        nodes = [strided[row] - b * batch.width for row in path]
        told += [(row, window[b, n].item(), window[b, j].item())
                 for j, (row, n) in enumerate(zip(path, nodes, strict=True))]  # fmt: skip
        told += [(0, 0, 0)] * behind
    table = batch.ints([x for row in index for x in row], torch.int32).view(-1, longest)
    given = table, batch.ints(lens, torch.int32), batch.ints([*strided, 0]), window, batch.width
    for function in (rows.accepted_paths, rows.accepted_paths_torch):
        same(torch.stack(function(*given), dim=1), [list(row) for row in told])


def check(batch: Batch) -> None:
    """Everything that takes a ragged batch."""
    check_packed_rows(batch)
    check_window(batch)
    check_pack_inputs(batch)
    check_indptr(batch)
    check_kv_indices(batch)
    columns = batch.rng.choice([1, 5, 64])
    dtype = batch.rng.choice([torch.bfloat16, torch.float32, torch.int32])
    check_scatter(batch, columns, dtype)


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

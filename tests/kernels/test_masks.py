"""Packed masks: kernels, twins and loops agree, and FlashInfer would read what trees mean.

The kernels run in Triton's interpreter, where a process of its own calls `main`, and where there
is one on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.kernels import masks, rows
from tests.gpu import at_size, gpu
from tests.kernels.hopper import compiled
from tests.kernels.processes import run_worker

UNTOUCHED = 0xA5  # both kinds of bits, so that a write of either is seen


@dataclass
class Forest:
    """B trees, padded to N nodes: parents as in `Trees`, and how many rows stand in the batch."""

    parents: list[list[int]]
    num_rows: list[int]
    prefixes: list[int]
    slots: int
    max_depth: int
    device: str = "cpu"

    def links(self) -> Tensor:
        width = len(self.parents[0]) if self.parents else 1
        return torch.tensor(self.parents, dtype=torch.int64, device=self.device).view(-1, width)

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def sees(self, b: int, row: int) -> set[int]:
        """Nodes on the way from a row to the root, which every row sees."""
        seen, above = {0, row}, self.parents[b][row]
        while above > 0:
            seen.add(above)
            above = self.parents[b][above]
        return seen

    def bits(self, b: int) -> list[int]:
        """The bit string of one request, as nested loops say it."""
        prefix, size = self.prefixes[b], self.num_rows[b]
        return [
            int(key < prefix or key - prefix in self.sees(b, row))
            for row in range(size)
            for key in range(prefix + size)
        ]


def random_forest(
    rng: random.Random, width: int, device: str = "cpu", size: int = -1, prefix: int = -1
) -> Forest:
    """Trees of 1 to N nodes; packed rows, or N rows for all, or none for a slot of the batch."""
    size = rng.choice([1, 2, 3, 6]) if size < 0 else size
    parents, num_rows = [], []
    padded = rng.random() < 0.3
    for _ in range(size):
        nodes = rng.choice([1, width, rng.randint(1, width)])
        # Up to three nodes back, so that large trees are deep and reach over many words.
        of_nodes = [-1] + [rng.randint(max(0, i - 3), i - 1) for i in range(1, nodes)]
        parents.append(of_nodes + [-1] * (width - nodes))
        num_rows.append(width if padded else rng.choice([nodes, nodes, nodes, 0]))
    return Forest(
        parents=parents,
        num_rows=num_rows,
        prefixes=[
            prefix if prefix >= 0 else rng.choice([0, 1, 7, rng.randint(0, 90)])
            for _ in range(size)
        ],
        slots=size + rng.choice([0, 1, 4]),
        max_depth=width,
        device=device,
    )


def bytes_of(bits: list[int]) -> list[int]:
    return [
        sum(bit << i for i, bit in enumerate(bits[start : start + 8]))
        for start in range(0, len(bits), 8)
    ]


def check_words(forest: Forest) -> None:
    """A bit for each node a row sees; those past 63 in further words."""
    links = forest.links()
    found = masks.ancestor_words_from_parents(links, forest.max_depth)
    twin = masks.ancestor_words_from_parents_torch(links, forest.max_depth)
    assert torch.equal(found, twin)
    for b, of_tree in enumerate(found.tolist()):
        for row, words in enumerate(of_tree):
            expected = sum(1 << node for node in forest.sees(b, row))
            assert sum((word % 2**64) << (64 * w) for w, word in enumerate(words)) == expected


def check_mask(forest: Forest, spare: int = 3) -> None:
    """Offsets and bytes as loops say, bytes behind untouched, and FlashInfer reads the mask."""
    links, prefixes = forest.links(), forest.ints(forest.prefixes)
    words = masks.ancestor_words_from_parents_torch(links, forest.max_depth)
    num_rows = forest.ints(forest.num_rows)
    of_requests = [bytes_of(forest.bits(b)) for b in range(len(forest.parents))]
    expected = [byte for of_request in of_requests for byte in of_request]
    starts = [0]
    for of_request in of_requests:
        starts.append(starts[-1] + len(of_request))
    starts += [starts[-1]] * (forest.slots - len(of_requests))

    out = torch.full((forest.slots + 2,), -7, dtype=torch.int32, device=forest.device)
    for indptr in (
        masks.mask_indptr(prefixes, num_rows, forest.slots),
        masks.mask_indptr(prefixes, num_rows, forest.slots, out),
        masks.mask_indptr_torch(prefixes, num_rows, forest.slots, torch.empty_like(out)),
    ):
        assert indptr.tolist() == starts, (indptr.tolist(), starts)
    assert out[-1] == -7
    most_keys = max(forest.prefixes, default=0) + len(links[0]) if len(links) else 0
    assert starts[-1] <= masks.mask_capacity(sum(forest.num_rows), forest.slots, most_keys)

    for function in (masks.pack_tree_mask, masks.pack_tree_mask_torch):
        mask = torch.full((len(expected) + spare,), UNTOUCHED, device=forest.device).byte()
        function(words, prefixes, num_rows, indptr, mask)
        assert mask.tolist() == expected + [UNTOUCHED] * spare
        # A buffer that is too short is filled, never overrun.
        short, fits = torch.full_like(mask, UNTOUCHED), len(expected) // 2
        function(words, prefixes, num_rows, indptr, short[:fits])
        assert short.tolist() == expected[:fits] + [UNTOUCHED] * (len(mask) - fits)

    read = as_flashinfer_reads(mask.cpu(), indptr.tolist(), forest.num_rows, forest.prefixes)
    assert read == [bit for b in range(len(forest.parents)) for bit in forest.bits(b)]


def as_flashinfer_reads(
    mask: Tensor, indptr: list[int], num_rows: list[int], prefixes: list[int]
) -> list[bool]:
    """Every (row, key) of the batch, by the arithmetic of FlashInfer's ``LogitsMask``."""
    found = []
    for b, (size, prefix) in enumerate(zip(num_rows, prefixes, strict=True)):
        kv_len = prefix + size
        offset = torch.arange(size)[:, None] * kv_len + torch.arange(kv_len)
        byte = mask[indptr[b] + offset // 8].to(torch.int64)
        found += (byte >> (offset % 8) & 1).bool().flatten().tolist()
    return found


def short_rows(device: str = "cpu") -> None:
    """Rows shorter than a byte, so that one holds many, and just longer."""
    for size in range(1, 6):
        prefixes = list(range(9 - size))
        chains = [[-1, *range(size - 1)] for _ in prefixes]
        num_rows = [size] * len(prefixes)
        check_mask(Forest(chains, num_rows, prefixes, len(prefixes), size, device))


def main() -> None:
    """Random forests of every width; short rows; a mask of many blocks and rounds."""
    rng = random.Random(0)
    rows.FULL_GRID = 8  # the interpreter runs one block after the other
    for width in (1, 2, 16, 63, 64, 65, 100):
        for _ in range(4):
            forest = random_forest(rng, width)
            check_words(forest)
            check_mask(forest)
    short_rows()
    check_mask(random_forest(rng, 2, size=0))
    check_mask(random_forest(rng, 20, size=2, prefix=3000))  # blocks that are all prefix


INT32, INT64 = torch.int32, torch.int64


def test_interpreted_kernels_do_what_loops_do() -> None:
    run_worker("test_masks")


@given(st.integers(0, 2**20), st.sampled_from([1, 2, 16, 63, 64, 65, 100]))
def test_words_name_the_ancestors(seed: int, width: int) -> None:
    check_words(random_forest(random.Random(seed), width))


WIDTHS = st.integers(1, 20) | st.sampled_from([63, 64, 65, 100])


@example(0, 3, -1, 0)
@given(st.integers(0, 2**20), WIDTHS, st.sampled_from([-1, 0, 1, 7, 8, 9, 200]), st.just(-1))
def test_masks_read_as_flashinfer_reads_them_are_the_dense_ones(
    seed: int, width: int, prefix: int, size: int
) -> None:
    check_mask(random_forest(random.Random(seed), width, prefix=prefix, size=size))


def test_no_capacity_beyond_the_range_of_offsets() -> None:
    assert masks.mask_capacity(2, 1, 5) == 3
    with pytest.raises(ValueError, match="lower the number of rows or the context"):
        masks.mask_capacity(32_768, 64, 2**20)


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
    short_rows("cuda")

"""Ragged batches fit the graphs FlashInfer captured for another batch of the same tier."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.flashinfer_plan import Ints, Plan, Shape, plan

SHAPES = 100
BATCHES_A_SHAPE = 100
TIERS = [1, 4, 8, 16, 32, 48, 64, 128, 192, 256, 512, 1024]
HEADS = [(1, 1), (8, 4), (8, 8), (4, 8), (2, 16), (32, 1)]  # kv heads, query heads per kv head


def random_shape(rng: np.random.Generator) -> Shape:
    kv_heads, group = HEADS[rng.integers(len(HEADS))]
    return Shape(
        slots=int(rng.integers(1, 65)),
        num_tokens=int(rng.choice(TIERS)),
        kv_heads=kv_heads,
        group=group,
        head_dim=int(rng.choice([64, 128, 256])),
    )


def random_batch(rng: np.random.Generator, shape: Shape) -> tuple[Ints, Ints]:
    """Rows and keys [S] of a batch of any size: nothing, one request, roots, or anything."""
    live = int(rng.integers(0, shape.slots + 1))
    rows = np.zeros(shape.slots, dtype=np.int64)
    kind = rng.integers(4)
    if kind == 0 and live:  # one request holds the whole tier
        rows[rng.integers(live)] = shape.num_tokens
    elif kind == 1:
        rows[: min(live, shape.num_tokens)] = 1
    elif live:  # a random part of the tier, cut at random places
        total = int(rng.integers(0, shape.num_tokens + 1))
        cuts = np.sort(rng.integers(0, total + 1, live - 1))
        rows[:live] = np.diff(cuts, prepend=0, append=total)
    rows = rng.permutation(rows) if kind == 3 else rows
    prefix = rng.integers(0, 40_000 if rng.random() < 0.5 else 200, shape.slots)
    ghosts = rng.integers(0, 2)  # slots of no request have one key, or none
    return rows, np.where(rows > 0, prefix + rows, ghosts)


def blocks_are_exact(shape: Shape, rows: Ints, keys: Ints, found: Plan) -> None:
    """Each (request, query tile, chunk of keys) has one thread block, and no other exists."""
    tiles = -(-rows * shape.group // shape.tile)
    chunks = -(-np.maximum(keys, 1) // found.kv_chunk)
    request, tile, chunk = found.request_indices, found.qo_tile_indices, found.kv_tile_indices
    assert ((request >= 0) & (request < shape.slots)).all()
    assert ((tile >= 0) & (tile < tiles[request])).all()
    assert ((chunk >= 0) & (chunk < chunks[request])).all()
    # In range and without repetition: as many as there are means all of them, and so that
    # every row meets every key once.
    name = (request * (tiles.max() + 1) + tile) * (chunks.max() + 1) + chunk
    assert len(np.unique(name)) == len(name) == (tiles * chunks).sum()


def buffers_are_kept(shape: Shape, rows: Ints, found: Plan) -> None:
    """Nothing is longer than at capture, and blocks and merge mean the same partial outputs."""
    assert len(found.request_indices) <= shape.grid
    assert len(found.o_indptr) == shape.slots + 1
    assert len(found.merge_indptr) == rows.sum() + 1 <= shape.num_tokens + 1
    assert found.o_indptr[-1] == found.merge_indptr[-1] <= shape.partial_rows
    # Row q of request b has its chunks' outputs at o_indptr[b] + q * chunks[b].
    request = np.repeat(np.arange(shape.slots), rows)
    row = np.arange(len(request)) - (rows.cumsum() - rows)[request]
    first = found.o_indptr[request] + row * found.chunks[request]
    assert (found.merge_indptr[:-1] == first).all()


def test_any_ragged_batch_of_a_tier_fits_the_graph_captured_for_it() -> None:
    """10 000 batches: tile and grid are the shape's, so frozen; the batch only fills lists."""
    rng = np.random.default_rng(0)
    full = 0
    for _ in range(SHAPES):
        shape = random_shape(rng)
        for _ in range(BATCHES_A_SHAPE):
            rows, keys = random_batch(rng, shape)
            found = plan(shape, rows, keys)
            blocks_are_exact(shape, rows, keys, found)
            buffers_are_kept(shape, rows, found)
            full += len(found.request_indices) == shape.grid
    assert full > 10, "no batch filled its grid: too easy"


@pytest.mark.parametrize(
    ("slots", "num_tokens", "tile"),
    [(32, 32, 16), (31, 32, 16), (30, 32, 64), (8, 32, 128), (1, 4, 64), (40, 32, 128)],
)
def test_the_tile_follows_from_slots_and_tier_alone(slots: int, num_tokens: int, tile: int) -> None:
    """As many slots as rows mean small tiles: a long request then reads its keys often."""
    assert Shape(slots, num_tokens, kv_heads=8, group=8).tile == tile

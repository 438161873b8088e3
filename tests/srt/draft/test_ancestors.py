"""Which KV slots draft rows attend to, against a walk over the beams' history."""

from __future__ import annotations

import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.srt.draft import ancestors
from tests.doubles import double


class Beams:
    """One request's beams after some steps: who each row descends from, and its own slots."""

    def __init__(self, rng: random.Random, topk: int, depth: int, first_slot: int) -> None:
        self.prefix = [rng.randrange(100) for _ in range(rng.randrange(4))]
        self.slots = [[first_slot + row * depth + step for step in range(depth)]
                      for row in range(topk)]  # fmt: skip
        parents = [[rng.randrange(topk) for _ in range(topk)] for _ in range(depth - 1)]
        self.rows = [self._path(parents, row) for row in range(topk)]

    @staticmethod
    def _path(parents: list[list[int]], row: int) -> list[int]:
        """Rows from the first step to this one."""
        path = [row]
        for of_row in reversed(parents):
            path.append(of_row[path[-1]])
        return path[::-1]

    def stock(self) -> list[list[int]]:
        return [self.prefix + own for own in self.slots]

    def exact(self) -> list[list[int]]:
        return [
            self.prefix + [self.slots[row][step] for step, row in enumerate(path)]
            for path in self.rows
        ]


@given(st.integers(0, 2**20), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_each_row_reads_its_ancestors_slots_behind_its_prefix(
    seed: int, batch: int, topk: int, depth: int
) -> None:
    rng = random.Random(seed)
    beams = [Beams(rng, topk, depth, 1000 * (b + 1)) for b in range(batch)]
    rows = [row for of in beams for row in of.stock()]
    indptr = torch.tensor([0, *map(len, rows), 7], dtype=torch.int32).cumsum(0).to(torch.int32)
    indices = torch.tensor([*chain(*rows), *range(7)], dtype=torch.int32)  # and other entries
    ancestors.follow_ancestors(indptr, indices, torch.tensor([of.rows for of in beams]))
    expected = [row for of in beams for row in of.exact()]
    assert indices.tolist() == [*chain(*expected), *range(7)]


def flashinfer(indices: list[int], num_wrappers: int = 1) -> Any:
    """SGLang's backend of two draft steps over these KV slots, as each step's plan left it."""
    wrapper = double(
        "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper",
        _paged_kv_indptr_buf=torch.tensor([0, 3, 6], dtype=torch.int32),
        _paged_kv_indices_buf=torch.tensor(indices, dtype=torch.int32),
    )
    metadata = double("DecodeMetadata", decode_wrappers=[wrapper])
    step = double("FlashInferAttnBackend", num_wrappers=num_wrappers, forward_metadata=metadata)
    return double("FlashInferMultiStepDraftBackend", attn_backends=[step, step])


def test_flashinfers_own_index_buffer_is_rewritten() -> None:
    """Two beams behind a prefix of one slot; the first descends from the second's first node."""
    backend = flashinfer([9, 10, 11, 9, 20, 21])
    follow = ancestors.follower(backend)
    follow(1, torch.tensor([[[1, 0], [0, 1]]]))
    (wrapper,) = backend.attn_backends[1].forward_metadata.decode_wrappers
    assert wrapper._paged_kv_indices_buf.tolist() == [9, 20, 11, 9, 10, 21]


def test_other_backends_are_left_alone() -> None:
    assert ancestors.follower(flashinfer([], num_wrappers=2)) is None
    assert ancestors.follower(SimpleNamespace(attn_backends=[])) is None


def test_a_sglang_that_follows_ancestors_itself_is_recognised() -> None:
    patched = SimpleNamespace(set_draft_ancestors=lambda step, rows: None)
    assert ancestors.sglang_follows(patched)
    assert not ancestors.sglang_follows(flashinfer([]))

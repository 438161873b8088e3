"""The patches' functions on CPU tensors, versus plain loops."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.apply import HERE

EXACT_ANCESTORS = sorted(HERE.glob("*/exact-ancestors.patch"))
PACKED_MASK_INDPTR = sorted(HERE.glob("*/packed-mask-indptr.patch"))
ATTENTION = "sglang/srt/layers/attention"
# B, K, D and a seed for lengths, slots and beams
drafts = st.tuples(
    st.integers(1, 3), st.integers(2, 4), st.integers(2, 6), st.integers(0, 2**32 - 1)
)


def version(patch: Path) -> str:
    """Name a test's case after the folder."""
    return patch.parent.name


def added(patch: Path, file: str, symbol: str) -> str:
    """The lines that the hunk with ``symbol`` adds to a file, as a block of their own."""
    _, _, diff = patch.read_text().partition(f"+++ b/{file}\n")
    hunks = diff.partition("\n--- a/")[0].split("\n@@ ")
    (hunk,) = [hunk for hunk in hunks if f"+{symbol}" in hunk.replace(" ", "")]
    lines = [line[1:] for line in hunk.splitlines() if line.startswith("+")]
    return textwrap.dedent("\n".join(lines))


def defined(source: str, **names: object) -> dict[str, Any]:
    """Names that a block defines, given the names it uses."""
    scope: dict[str, Any] = {"torch": torch, "Optional": Optional, **names}
    exec(source, scope)
    return scope


class Draft:
    """A batch's draft tree in which every step picks random parents, and where its KV went.

    Args:
        parents: [i][b][t] the beam row that row t of step i + 1 descends from.
        prefix: [b] slots of the committed tokens.
        slots: [b][t][i] the slot that row t writes at step i.
    """

    def __init__(
        self, parents: list[list[list[int]]], prefix: list[list[int]], slots: list[list[list[int]]]
    ) -> None:
        self.parents, self.prefix, self.slots = parents, prefix, slots
        self.topk = len(slots[0])
        self.forwards = len(slots[0][0]) - 1  # the last layer is never forwarded

    @classmethod
    def random(cls, batch: int, topk: int, steps: int, seed: int) -> Draft:
        rng = random.Random(seed)
        fresh = iter(rng.sample(range(10_000), 1_000))
        return cls(
            [[rng.choices(range(topk), k=topk) for _ in range(batch)] for _ in range(steps - 1)],
            [[next(fresh) for _ in range(rng.randrange(9))] for _ in range(batch)],
            [[[next(fresh) for _ in range(steps)] for _ in range(topk)] for _ in range(batch)],
        )

    def read_by_stock(self, step: int) -> list[list[int]]:
        """[B*K] what each row attends to without the patch: what its own row wrote."""
        rows = zip(self.prefix, self.slots, strict=True)
        return [prefix + own[: step + 1] for prefix, beams in rows for own in beams]

    def true_ancestors(self, step: int) -> list[list[int]]:
        """[B*K] what each row must attend to, by walking up from each node."""
        rows = []
        for b, prefix in enumerate(self.prefix):
            for t in range(self.topk):
                path, row = [], t
                for i in range(step, -1, -1):
                    path.append(self.slots[b][row][i])
                    if i > 0:
                        row = self.parents[i - 1][b][row]
                rows.append(prefix + path[::-1])
        return rows

    def tree_info(self, step: int) -> tuple[None, None, torch.Tensor]:
        """The result of ``select_top_k_tokens`` when row t is child t of its parent."""
        batch, k = len(self.prefix), self.topk
        if step == 0:
            return None, None, torch.arange(-1, k).expand(batch, -1)
        picked = torch.tensor(self.parents[step - 1]) * k + torch.arange(k)
        return None, None, picked + k * k * (step - 1) + k


class Packed:
    """KV indices of FlashInfer and Triton: one packed list per step."""

    def __init__(self, draft: Draft) -> None:
        self.steps = []
        for step in range(draft.forwards):
            rows = draft.read_by_stock(step)
            ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).to(torch.int32)
            spare = [-1] * 5  # the buffer of a CUDA graph is longer than a batch needs
            indices = torch.tensor([slot for row in rows for slot in row] + spare)
            self.steps.append((ends, indices.to(torch.int32)))
        self.attn_backends = [
            SimpleNamespace(forward_metadata=self.metadata(*step)) for step in self.steps
        ]

    def read(self, step: int) -> list[list[int]]:
        ends, indices = self.steps[step]
        assert (indices[int(ends[-1]) :] == -1).all()
        return [part.tolist() for part in indices.tensor_split(ends[1:].long())[:-1]]


class FlashInfer(Packed):
    file = f"{ATTENTION}/flashinfer_backend.py"

    def metadata(self, ends: torch.Tensor, indices: torch.Tensor) -> SimpleNamespace:
        wrapper = SimpleNamespace(_paged_kv_indptr_buf=ends, _paged_kv_indices_buf=indices)
        return SimpleNamespace(decode_wrappers=[wrapper])


class Triton(Packed):
    file = f"{ATTENTION}/triton_backend.py"
    window_rail = False

    def metadata(self, ends: torch.Tensor, indices: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(kv_indptr=ends, kv_indices=indices)


class TritonWindow(Triton):
    """Layers with a sliding window, whose indices are lists of their own."""

    window_rail, sliding_window_size = True, 8

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self.window = Triton(draft)
        for attention, (ends, indices) in zip(self.attn_backends, self.window.steps, strict=True):
            attention.forward_metadata.window_kv_indptr = ends
            attention.forward_metadata.window_kv_indices = indices

    def read(self, step: int) -> list[list[int]]:
        assert super().read(step) == self.window.read(step)
        return self.window.read(step)


class IntelAMX:
    """KV indices of the CPU backend: one table for all steps."""

    file = f"{ATTENTION}/intel_amx_backend.py"

    def __init__(self, draft: Draft) -> None:
        rows = draft.read_by_stock(draft.forwards)
        self.table = torch.full((len(rows), 40), -1, dtype=torch.int32)
        for row, slots in zip(self.table, rows, strict=True):
            row[: len(slots)] = torch.tensor(slots)
        lens = torch.tensor([len(row) for row in rows]) - draft.forwards - 1
        self.attn_backends = [
            SimpleNamespace(draft_decode_metadata=(self.table, lens + step + 1, None))
            for step in range(draft.forwards)
        ]

    def read(self, step: int) -> list[list[int]]:
        _, lens, _ = self.attn_backends[step].draft_decode_metadata
        return [row[:n].tolist() for row, n in zip(self.table, lens, strict=True)]


Backend = type[FlashInfer] | type[Triton] | type[IntelAMX]
BACKENDS = [
    pytest.param(patch, kind, id=f"{version(patch)} {kind.__name__}")
    for patch in EXACT_ANCESTORS
    for kind in (FlashInfer, Triton, TritonWindow, IntelAMX)
    if kind is not TritonWindow or version(patch) == "sglang-0.5.23"
]
each_sglang = pytest.mark.parametrize("patch", EXACT_ANCESTORS, ids=version)


def patched(patch: Path, kind: Backend, draft: Draft) -> Any:
    """A stand-in for the multi-step backend, with the method that the patch gives it."""
    helpers = defined(
        added(patch, "sglang/srt/speculative/spec_utils.py", "deffollow_draft_ancestors")
    )
    method = defined(added(patch, kind.file, "defset_draft_ancestors"), **helpers)
    return type("Patched", (kind,), {"set_draft_ancestors": method["set_draft_ancestors"]})(draft)


def run_draft_forward(
    patch: Path, draft: Draft, backend: Any, each_step: Callable[[int], None]
) -> None:
    """The patch's part of ``draft_forward``'s loop."""
    spec_utils, worker = (
        f"sglang/srt/speculative/{name}.py" for name in ("spec_utils", "eagle_worker_v2")
    )
    scope = defined(added(patch, spec_utils, "defdraft_ancestor_rows"))
    block = compile(added(patch, worker, "ancestor_rows=draft_ancestor_rows("), "loop", "exec")
    mode = SimpleNamespace(is_idle=lambda: False)
    scope |= {
        "self": SimpleNamespace(topk=draft.topk, draft_attn_backend=backend),
        "forward_batch": SimpleNamespace(forward_mode=mode),
        "ancestor_rows": None,
    }
    for step in range(draft.forwards):
        scope |= {"i": step, "tree_info": draft.tree_info(step)}
        exec(block, scope)
        each_step(step)


@pytest.mark.parametrize(("patch", "kind"), BACKENDS)
@given(shape=drafts)
@settings(max_examples=40, deadline=None)
def test_every_draft_row_reads_its_true_ancestors(
    patch: Path, kind: Backend, shape: tuple[int, int, int, int]
) -> None:
    draft = Draft.random(*shape)
    backend = patched(patch, kind, draft)

    def check(step: int) -> None:
        assert backend.read(step) == draft.true_ancestors(step)

    run_draft_forward(patch, draft, backend, check)


@each_sglang
def test_a_backend_without_the_method_is_left_alone(patch: Path) -> None:
    draft = Draft.random(batch=2, topk=3, steps=4, seed=1)
    backend = Triton(draft)
    run_draft_forward(patch, draft, backend, lambda step: None)
    assert [backend.read(step) for step in range(3)] == [draft.read_by_stock(i) for i in range(3)]


@pytest.mark.parametrize("patch", PACKED_MASK_INDPTR, ids=version)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_the_kernel_finds_every_bit_of_a_packed_mask(
    patch: Path, sizes: list[tuple[int, int]], seed: int
) -> None:
    scope = defined(added(patch, "flashinfer/prefill.py", "def_packed_mask_indptr"))
    rng = np.random.default_rng(seed)
    masks = [rng.integers(0, 2, queries * keys, np.uint8) for queries, keys in sizes]
    packed = np.concatenate([np.packbits(mask, bitorder="little") for mask in masks])
    in_bits = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0).to(torch.int32)
    in_bytes = scope["_packed_mask_indptr"](in_bits)
    assert in_bytes.dtype == in_bits.dtype
    assert in_bytes[-1] == len(packed)
    for start, mask in zip(in_bytes.tolist(), masks, strict=False):
        # flashinfer/attention/variants.cuh: a byte pointer per request, then bit by bit
        read = [packed[start + bit // 8] >> (bit % 8) & 1 for bit in range(len(mask))]
        assert read == mask.tolist()

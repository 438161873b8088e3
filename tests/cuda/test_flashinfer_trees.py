"""FlashInfer on ragged trees: one captured graph, other shapes at every replay, no mask of bools.

Against dense float32 attention. What the attention kernel reads is written by our own kernels;
the planner gets the lengths from the host, as SGLang's sync-free replay does.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eval.gpu.microbench import trees
from tests import oracles
from tests.gpu import gpu

HEADS, KV_HEADS = 8, 4
SLOTS, WIDTH = 6, 12  # request slots, most nodes of a tree
TIER = 40  # rows of the graph
POOL = 1024  # KV slots
CONTEXT = 128
BF16_ERROR = 1e-2  # relative; bf16 operands land between 1e-3 and 1e-2


class Batch:
    """Trees behind prefixes, their keys scattered over the pool."""

    def __init__(self, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.parents, num_rows = trees(batch, WIDTH)
        num_rows[torch.rand(batch) < 0.25] = 0  # slots that verify nothing
        while int(num_rows.sum()) > TIER:
            num_rows = num_rows // 2
        self.num_rows = num_rows.to(torch.int32)
        self.prefix = torch.randint(1, CONTEXT - WIDTH, (batch,), dtype=torch.int32)
        self.table = torch.randperm(POOL)[: batch * CONTEXT].view(batch, CONTEXT).to(torch.int32)

    def visible(self, request: int, row: int) -> list[int]:
        """Positions a row sees: the prefix, itself and its ancestors."""
        nodes = oracles.ancestors(self.parents[request].tolist(), row)
        prefix = int(self.prefix[request])
        return [*range(prefix), *(prefix + node for node in sorted(nodes))]

    def attention(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R, H, D] float32, row by row."""
        out = []
        for request, rows in enumerate(self.num_rows.tolist()):
            for row in range(rows):
                at = self.table[request, self.visible(request, row)].long().to(keys.device)
                k = keys[at, 0].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
                v = values[at, 0].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
                scores = torch.einsum("hd,khd->hk", q[len(out)].float(), k) / q.shape[-1] ** 0.5
                out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(out) if out else q.new_zeros(0, *q.shape[1:]).float()


class GraphedAttention:
    """A wrapper captured once for SLOTS requests and TIER rows."""

    def __init__(self, head_dim: int) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        zeros = lambda size, dtype=torch.int32: torch.zeros(  # noqa: E731 - buffers
            size, dtype=dtype, device="cuda"
        )
        self.head_dim = head_dim
        self.qo, self.kv = zeros(SLOTS + 1), zeros(SLOTS + 1)
        self.indices = zeros(SLOTS * CONTEXT + TIER)
        self.mask_starts = zeros(SLOTS + 1)
        self.mask = zeros(TIER * CONTEXT, torch.uint8)
        ones = torch.ones(SLOTS, dtype=torch.int32, device="cuda")
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(
            zeros(128 << 20, torch.uint8), "NHD", use_cuda_graph=True, backend="fa2",
            qo_indptr_buf=self.qo, paged_kv_indptr_buf=self.kv,
            paged_kv_indices_buf=self.indices, paged_kv_last_page_len_buf=ones,
            custom_mask_buf=self.mask, mask_indptr_buf=self.mask_starts,
        )  # fmt: skip
        shape = (POOL, 1, KV_HEADS, head_dim)
        self.cache = tuple(torch.randn(shape, device="cuda").bfloat16() for _ in "kv")
        self.q = torch.randn(TIER, HEADS, head_dim, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self.ones = ones

    def capture(self) -> None:
        """Capture with the rows spread over the slots."""
        rows = torch.full((SLOTS,), TIER // SLOTS, dtype=torch.int32)
        rows[0] += TIER - int(rows.sum())
        keys = rows + CONTEXT // 2
        host = [starts(rows), starts(keys)]
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        self.wrapper.begin_forward(
            *host, self.indices[:0], torch.ones_like(rows), HEADS, KV_HEADS, self.head_dim, 1,
            **types, non_blocking=True,
        )  # fmt: skip
        self.qo.copy_(host[0])
        self.kv.copy_(host[1])
        self.run()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        """The part a graph holds."""
        self.wrapper.run(self.q, self.cache, out=self.out)

    def replay(self, batch: Batch) -> Tensor:
        """[R, H, D] of the rows of the batch; everything else of ``out`` is poisoned before."""
        from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

        from sglang_c2t.kernels import masks, rows

        size = len(batch.num_rows)
        lens, prefix = batch.num_rows.cuda(), batch.prefix.cuda()
        rows.indptr(lens, SLOTS, out=self.qo)
        rows.indptr(lens, SLOTS, prefix_lens=prefix, ghost=1, out=self.kv)
        slots = torch.arange(size, device="cuda")
        rows.ragged_kv_indices(batch.table.cuda(), slots, prefix, lens, self.kv, self.indices)
        words = masks.ancestor_words_from_parents(batch.parents.cuda(), WIDTH)
        masks.mask_indptr(prefix, lens, SLOTS, out=self.mask_starts)
        masks.pack_tree_mask(words, prefix, lens, self.mask_starts, self.mask)
        all_rows = torch.zeros(SLOTS, dtype=torch.int32)
        all_keys = torch.ones(SLOTS, dtype=torch.int32)
        all_rows[:size] = batch.num_rows
        all_keys[:size] = batch.num_rows + batch.prefix
        fast_prefill_plan(
            self.wrapper, self.qo, self.kv, self.indices[:0], self.ones, HEADS, KV_HEADS,
            self.head_dim, 1, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            qo_indptr_host=starts(all_rows), kv_indptr_host=starts(all_keys),
            kv_lens_host=all_keys, max_q_len=max(int(all_rows.max()), 1),
            max_kv_len=int(all_keys.max()),
        )  # fmt: skip
        self.q.normal_()
        self.out.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out[: int(batch.num_rows.sum())]


def starts(lengths: Tensor) -> Tensor:
    """[S + 1] int32 on the host."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


@gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_captured_graph_serves_trees_of_other_shapes_at_each_replay(head_dim: int) -> None:
    pytest.importorskip("flashinfer")
    attention = GraphedAttention(head_dim)
    attention.capture()
    sizes = [SLOTS, 1, 3, SLOTS, 2, 5, SLOTS, 4] * 3
    for seed, size in enumerate(sizes):
        batch = Batch(size, seed)
        if int(batch.num_rows.sum()) == 0:
            continue
        got = attention.replay(batch).float()
        expected = batch.attention(attention.q, *attention.cache)
        error = float((got - expected).norm() / expected.norm())
        assert error < BF16_ERROR, f"batch {seed}, rows {batch.num_rows.tolist()}: {error:.2e}"

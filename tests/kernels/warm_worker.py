"""Kernels that packed verification would compile while it serves, by Triton's own keys.

Nothing is run: only dtypes and sizes count.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import torch
from sglang.kernels.ops.speculative.ragged_verify_kernels import BuildQoIndptr, PaddedToBucket
from triton.runtime.interpreter import InterpretedFunction

from sglang_c2t.kernels.accept import accept_paths
from sglang_c2t.kernels.rows import chain_links, scatter_rows
from sglang_c2t.kernels.trees import cut_and_link
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt import compat
from sglang_c2t.srt.verify import packing
from sglang_c2t.srt.verify.flashinfer import RaggedFlashInferBackend, _GraphBuffers
from sglang_c2t.srt.verify.packing import HostSizes, Packing
from sglang_c2t.srt.verify.warm_up import warm_up
from sglang_c2t.tree import LinkedTrees, Trees
from tests.doubles import double
from tests.triton_keys import key_of

MAX_REQUESTS, CONTEXT, VOCABULARY, HIDDEN = 40, 64, 512, 64
WIDTH = {"chains": 6, "trees": 9}
SEEN: set[Hashable] = set()


def record_keys() -> None:
    """Remember in :data:`SEEN` what each launch would be compiled for, instead of launching."""

    def recording(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        SEEN.add(key_of(self, args, kwargs))

    InterpretedFunction.run = recording


class Server:
    """A target with FlashInfer and CUDA graphs, as far as packing goes."""

    def __init__(self, kind: str) -> None:
        self.trees, self.width = kind == "trees", WIDTH[kind]
        self.tiers = Tiers(MAX_REQUESTS + 1, self.width, rows_per_slot=2 if self.trees else 1)
        pool = double(
            "ReqToTokenPool",
            req_to_token=torch.zeros((MAX_REQUESTS + 2, CONTEXT), dtype=torch.int32),
        )
        config = double(
            "sglang.srt.configs.model_config.ModelConfig", vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
        )  # fmt: skip
        self.backend = double(RaggedFlashInferBackend, req_to_token_pool=pool)
        self.runner = double(
            "ModelRunner", device="cpu", dtype=torch.bfloat16, model_config=config,
            req_to_token_pool=pool, attn_backend=self.backend,
            decode_cuda_graph_runner=double(
                "sglang_c2t.srt.verify.graphs.TieredGraphRunner", tiers=self.tiers
            ),
        )  # fmt: skip
        slots, most = MAX_REQUESTS + 1, max(self.tiers.rows)
        starts = lambda: torch.zeros(slots + 1, dtype=torch.int32)  # noqa: E731
        self.buffers = _GraphBuffers(
            starts(), starts(), torch.zeros(slots * CONTEXT + most, dtype=torch.int32),
            torch.ones(slots, dtype=torch.int32), starts(),
            torch.zeros(most * CONTEXT, dtype=torch.uint8),
        )  # fmt: skip

    def shape(self, batch: int) -> dict[str, Any]:
        if not self.trees:
            return {}
        parents = torch.zeros((batch, self.width), dtype=torch.int64)
        return {"parents": parents, "num_steps": 3}

    def cut(self, parents: torch.Tensor, rng: random.Random) -> LinkedTrees:
        """As the draft's end leaves them: links in one table; all of them, or what is chosen."""
        above, depth, source = parents[:, :, None].repeat(1, 1, 3).unbind(dim=2)
        nodes = torch.ones(len(parents), dtype=torch.int64)
        chosen = torch.zeros((len(parents), self.width - 1), dtype=torch.bool)
        drafted = Trees(torch.zeros_like(parents), above, depth, nodes, source)
        made = cut_and_link(drafted, nodes.to(torch.int32), rng.choice([None, chosen]))
        made.parents.zero_()  # no kernel has filled it in
        return made

    def capture(self) -> None:
        """Plans of `graphs.py` for each tier, with the rows of SGLang's layout."""
        for rows in self.tiers.rows:
            slots = self.tiers.slots(rows)
            lens = torch.full((slots,), rows // slots, dtype=torch.int32)
            packed = Packing(lens, self.width, sizes=HostSizes(lens), **self.shape(slots))
            self.plan(packed, slots)

    def plan(self, packed: Packing, slots: int) -> None:
        lens = torch.ones(slots, dtype=torch.int64)
        batch = double(
            "ForwardBatch", batch_size=slots, seq_lens=lens, seq_lens_cpu=lens,
            req_pool_indices=torch.zeros(slots, dtype=torch.int64),
        )  # fmt: skip
        self.backend._fill(batch, packed, self.buffers)

    def verify(self, batch: int, rng: random.Random) -> None:
        """A step of a batch, by the dtypes that SGLang and our gates use."""
        lens = torch.tensor([rng.randint(1, self.width) for _ in range(batch)])
        lens = lens if self.trees else lens.to(torch.int32)
        shape = self.shape(batch)
        if self.trees:
            shape["parents"] = self.cut(shape["parents"], rng).parents
        packed = Packing(lens, self.width, **shape)
        table = torch.zeros(batch * self.width, dtype=torch.int64)
        verify_input = double(
            "EagleVerifyInput", draft_token=table, positions=table, spec_steps=self.width - 1
        )
        requests = double(
            "ScheduleBatch", req_to_token_pool=self.runner.req_to_token_pool,
            req_pool_indices=table[:batch], seq_lens=table[:batch],
        )  # fmt: skip
        packed.forwarded(verify_input, requests, self.runner)
        if packed.forwarded_rows in self.tiers.rows:
            self.plan(packed, self.tiers.slots(packed.forwarded_rows))
        layout = packed.layout
        accept_paths(
            packed.rows, table, packed.num_rows, layout.row_starts, layout.window, packed.parents,
            longest=4 if self.trees else self.width, most=rng.choice([1, 4]),
        )  # fmt: skip
        if not self.trees:
            chain_links(packed.num_rows, self.width)
            hidden = torch.zeros((packed.forwarded_rows, 3 * HIDDEN), dtype=torch.bfloat16)
            logits = torch.zeros((packed.forwarded_rows, VOCABULARY))
            for output in (hidden, logits):
                scatter_rows(output, packed.num_rows, self.width)


def check(kind: str) -> None:
    SEEN.clear()
    server = Server(kind)
    server.capture()
    captured = len(SEEN)
    warm_up(server.runner, None, server.width, MAX_REQUESTS, trees=server.trees, num_steps=3)
    warm = set(SEEN)
    rng = random.Random(0)
    for batch in [*range(1, MAX_REQUESTS + 1), *(rng.randint(1, MAX_REQUESTS) for _ in range(60))]:
        server.verify(batch, rng)
        assert warm == SEEN, f"compiled for a batch of {batch}: {SEEN - warm}"
    assert len(warm) > captured > 0
    print(f"{kind}: {len(warm)} kernels, none while serving")


def main() -> None:
    """Chains and trees."""
    for kernel in (BuildQoIndptr, PaddedToBucket):  # on a CPU SGLang takes their twins in torch
        kernel.execute = kernel.triton
    packing.peers = lambda: None
    compat.target_hidden_width = lambda draft_runner: 3 * HIDDEN
    record_keys()
    for kind in WIDTH:
        check(kind)

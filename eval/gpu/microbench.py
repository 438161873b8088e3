"""Time of each part that C2T adds to a step on this GPU, against the bytes that it must move.

    python -m eval.gpu.microbench --out runs/gpu/micro.json

Parts: the gate of one drafted layer, packing rows and masks, and the device-to-host transfer of a
step. ``graph``: device work, timed as replays of a graph; ``host``: wall time with the device idle
before and after. A floor counts each byte of inputs and outputs once, at the bandwidth of a large
copy on this machine.

Legend: B requests, V draft vocabulary, N rows a request, T packed rows, L committed tokens.
"""

# mypy: disable-error-code="no-untyped-call"
# Kernel modules annotate only what is called from Python; some of it is still in the making.

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from eval.tables import markdown

BATCHES = (1, 8, 32, 64, 128, 256)
VOCABS = (32_000, 128_256)
WIDTH = 8  # rows of a chain of 7, root included
TREE = 32  # nodes of a tree, root included
PREFIX = 512  # committed tokens of every request
HIDDEN = 48  # units of C2T's network


#: Rounds of works that a graph holds.
ROUNDS = 8


def _clock() -> float:
    """Seconds, once the device is idle."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Work(NamedTuple):
    """A part at one size; its ``works`` do the same on other inputs, so that no cache has them."""

    part: str
    size: str
    works: Sequence[Callable[[], object]]
    floor_bytes: int
    on_host: bool = False

    def seconds(self, run_seconds: float) -> tuple[float, float, float]:
        """Time of one call: median, and what a tenth of the calls are below and above."""
        work, calls = (self.works[0], 1) if self.on_host else (
            self._graph().replay, ROUNDS * len(self.works)
        )  # fmt: skip
        names = {"work": work, "wait": torch.cuda.synchronize}
        timer = Timer("work(); wait()" if self.on_host else "work()", globals=names, timer=_clock)
        times = timer.blocked_autorange(min_run_time=run_seconds).times
        low, median, high = np.quantile(times, (0.1, 0.5, 0.9)) / calls
        return float(median), float(low), float(high)

    def _graph(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(torch.cuda.Stream()):
            for work in self.works:  # compiles, and makes what capture may not allocate
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in [*self.works] * ROUNDS:
                work()
        return graph


def nbytes(*tensors: Any) -> int:
    """Bytes of all tensors, those of named tuples included."""
    return sum(
        one.numel() * one.element_size() if isinstance(one, Tensor)
        else nbytes(*one) if isinstance(one, tuple) else 0
        for one in tensors
    )  # fmt: skip


def gates(batch: int, vocab: int) -> list[Work]:
    """One drafted layer of a chain: our kernel, and the same in torch, which no graph can hold."""
    from sglang_c2t.kernels.gate import judge_layer, judge_layer_reference
    from sglang_c2t.kernels.gate_program import FusedGate, GateOutput, Weights

    draw = partial(torch.randn, device="cuda")
    weights = Weights(draw(HIDDEN, 3), draw(HIDDEN), draw(1, HIDDEN), draw(1))
    program = FusedGate(("joint", "entropy", "depth"), weights, beta=0.5, device="cuda")
    joint = torch.rand(batch, device="cuda")
    alive = torch.ones(batch, dtype=torch.bool, device="cuda")
    kept = torch.zeros(batch, dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {
        "depth": 2, "topk": 1, "joint": joint, "alive": alive, "num_kept": kept,
    }  # fmt: skip

    def inputs() -> tuple[Tensor, Any]:
        return draw(batch, vocab).mul_(4).bfloat16(), GateOutput.empty(batch, 1, "cuda")

    floor = nbytes(*inputs())
    # So many that 256 MB pass before one comes again and could be in the cache; 8 at most.
    sets = [inputs() for _ in range(min(max(256_000_000 // floor, 2), 8))]
    works = [partial(judge_layer, logits, program, out=out, **given) for logits, out in sets]
    in_torch = partial(judge_layer_reference, sets[0][0], program, out=sets[0][1], **given)
    size = f"B {batch}, V {vocab}"
    return [
        Work("gate of a layer", size, works, floor),
        Work("the same in torch", size, [in_torch], floor, on_host=True),
    ]


def packing(batch: int) -> list[Work]:
    """Chains: the layout of packed rows, accepted paths, KV indices, and unpacked logits."""
    from sglang_c2t.kernels import layout
    from sglang_c2t.kernels import rows as kernels
    from sglang_c2t.kernels.accept import accept_paths

    lens = torch.randint(1, WIDTH + 1, (batch,), dtype=torch.int32, device="cuda")
    total = int(lens.sum())
    # int32 as in SGLang, whose tables hold slots
    table = torch.arange(batch * 1024, dtype=torch.int32, device="cuda").view(batch, 1024)
    slots = torch.arange(batch, device="cuda")
    seq_lens = torch.full((batch,), PREFIX, device="cuda")
    tokens = torch.randint(0, 32_000, (batch * WIDTH,), device="cuda")
    starts = kernels.indptr(lens, batch, prefix_lens=seq_lens)
    indices = torch.empty(batch * 1024, dtype=torch.int32, device="cuda")
    vocab = VOCABS[-1]
    packed = torch.randn(total, vocab, device="cuda")
    full = torch.empty(batch * WIDTH, vocab, device="cuda")

    given = lens, tokens, tokens, table, slots, seq_lens
    lay_out = partial(layout.lay_out, *given, tokens=total, slots=batch, places=WIDTH)
    packed_at = lay_out()
    paths = packed_at.rows, tokens, lens, packed_at.row_starts, packed_at.window
    accept = partial(accept_paths, *paths, longest=WIDTH, most=WIDTH)
    unpack = partial(kernels.scatter_rows, packed, lens, WIDTH, full)
    kv = partial(kernels.ragged_kv_indices, table, slots, seq_lens, lens, starts, indices)
    size = f"B {batch}, T {total}"
    laid_out = nbytes(lens, tokens, tokens, slots, seq_lens, packed_at)
    kv_bytes = 2 * indices.element_size() * (batch * PREFIX + total)
    return [
        Work("forward laid out", size, [lay_out], laid_out),
        Work("accepted paths", size, [accept], nbytes(*paths)),
        Work("KV indices", size, [kv], kv_bytes),
        Work(f"logits unpacked, V {vocab}", size, [unpack], nbytes(packed, full)),
    ]


def trees(batch: int) -> tuple[Tensor, Tensor]:
    """Random parents [B, N] int64 and rows [B] in [1, N]; padding is the root's child."""
    node = torch.arange(TREE)
    parents = (torch.rand(batch, TREE) * node).long()
    parents[:, 0] = -1
    return parents, torch.randint(1, TREE + 1, (batch,))


def masks(batch: int) -> list[Work]:
    """FlashInfer's packed tree mask, straight from parents."""
    from sglang_c2t.kernels import masks as kernels

    parents, num_rows = (tensor.cuda() for tensor in trees(batch))
    num_rows = num_rows.to(torch.int32)
    prefix = torch.full((batch,), PREFIX, device="cuda")
    words = kernels.ancestor_words_from_parents(parents, TREE)
    starts = kernels.mask_indptr(prefix, num_rows, batch)
    capacity = kernels.mask_capacity(batch * TREE, batch, PREFIX + TREE)
    out = torch.zeros(capacity, dtype=torch.uint8, device="cuda")

    from_parents = partial(kernels.ancestor_words_from_parents, parents, TREE)
    pack = partial(kernels.pack_tree_mask, words, prefix, num_rows, starts, out)
    size = f"B {batch}, {TREE} nodes, L {PREFIX}"
    mask_bytes = nbytes(words) + batch * -(-TREE * (PREFIX + TREE) // 8)
    return [
        Work("ancestor words", size, [from_parents], nbytes(parents, words)),
        Work("packed tree mask", size, [pack], mask_bytes),
    ]


def transfer(batch: int) -> list[Work]:
    """Lengths to the host, which chooses the graph by their sum: the one wait of a step."""
    lens = torch.randint(1, WIDTH + 1, (batch,), dtype=torch.int32, device="cuda")
    pinned = torch.empty(batch, dtype=torch.int32, pin_memory=True)

    def through_pinned() -> None:
        pinned.copy_(lens, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    size, moved = f"B {batch}", nbytes(lens)
    return [
        Work("lengths to the host", size, [lens.cpu], moved, on_host=True),
        Work("the same, pinned", size, [through_pinned], moved, on_host=True),
    ]


def ceilings(gib: float, side: int, run_seconds: float) -> dict[str, Any]:
    """Bandwidth of copies of so many GiB, read plus written, and rate of bfloat16 products."""
    size = int(gib * 2**30)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    works = partial(torch.empty_like(source).copy_, source), partial(torch.matmul, left, right)
    copy, product = (
        Work("", "", [work], 0, on_host=True).seconds(run_seconds)[0] for work in works
    )
    return {"gpu": torch.cuda.get_device_name(), "bytes_per_s": 2 * size / copy,
            "flops_per_s": 2 * side**3 / product}  # fmt: skip


COLUMNS = ["size", "timed", "us, median [10 %, 90 %]", "floor, us", "time / floor"]


def line(row: dict[str, Any], bytes_per_s: float) -> str:
    """A line of the table."""
    median, low, high = (1e6 * seconds for seconds in row["seconds"])
    floor = 1e6 * row["floor_bytes"] / bytes_per_s
    factor = f"{median / floor:.1f}" if floor > 0.01 else "-"
    cells = [row["size"], row["kind"], f"{median:.1f} [{low:.1f}, {high:.1f}]", f"{floor:.2f}"]
    return markdown.row(row["part"], [*cells, factor])


def main(argv: Sequence[str] | None = None) -> int:
    """Time all parts; a part that fails is reported and the others go on."""
    parser = argparse.ArgumentParser(prog="python -m eval.gpu.microbench", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--brief", action="store_true", help="only see whether all parts run")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("eval.gpu.microbench: needs a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    run_seconds = 0.0 if args.brief else 0.1
    gib, side = (0.01, 256) if args.brief else (4, 8192)
    found = ceilings(gib, side, run_seconds)
    bytes_per_s = found["bytes_per_s"]
    print(f"{found['gpu']}, copies at {bytes_per_s / 1e12:.2f} TB/s\n")
    print(f"{markdown.row('part', COLUMNS)}\n{markdown.rule(3, words=3)}")
    rows: list[dict[str, Any]] = []
    failed = 0
    for batch in args.batches:
        parts: list[Callable[[int], list[Work]]] = [partial(gates, vocab=n) for n in VOCABS]
        for part in (*parts, packing, masks, transfer):
            try:
                for work in part(batch):
                    kind = "host" if work.on_host else "graph"
                    rows.append({"part": work.part, "size": work.size, "kind": kind,
                                 "seconds": work.seconds(run_seconds),
                                 "floor_bytes": work.floor_bytes})  # fmt: skip
                    print(line(rows[-1], bytes_per_s), flush=True)
            except Exception as error:  # one missing kernel must not cost the other numbers
                failed += 1
                print(f"FAILED {part}: {type(error).__name__}: {error}", file=sys.stderr)
            torch.cuda.empty_cache()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"ceilings": found, "rows": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Time of each part that C2T adds to a step on this GPU, against the bytes that it must move.

    python -m eval.gpu.microbench --ceilings runs/gpu/ceilings.json --out runs/gpu/micro.json

Parts: the gate of one drafted layer, packing rows and masks, and the device-to-host transfer of a
step. Device work is timed as replays of a graph, host work with the device idle around it. A floor
counts each byte of inputs and outputs once, at the bandwidth of a large copy.

Legend: B requests, V draft vocabulary, N rows a request, T packed rows, L committed tokens.
"""

# mypy: disable-error-code="no-untyped-call"
# Kernel modules annotate only what is called from Python; some of it is still in the making.

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.gpu.roofline import Ceilings, measure
from eval.gpu.timing import Timing, briefly, by_graph, by_host
from eval.tables import markdown

BATCHES = (1, 8, 32, 64, 128, 256)
VOCABS = (32_000, 128_256)
WIDTH = 8  # rows of a chain of 7, root included
TREE = 32  # nodes of a tree, root included
PREFIX = 512  # committed tokens of every request
HIDDEN = 48  # units of C2T's network


@dataclass(frozen=True)
class Row:
    """One line: a part at one size."""

    part: str
    size: str
    timing: Timing
    floor_bytes: int
    kind: str
    """``graph``: on the device, in a captured graph; ``host``: wall time, the device idle."""


def nbytes(*tensors: Any) -> int:
    """Bytes of all tensors, those of named tuples included."""
    return sum(
        one.numel() * one.element_size() if isinstance(one, Tensor)
        else nbytes(*one) if isinstance(one, tuple) else 0
        for one in tensors
    )  # fmt: skip


# -- parts --------------------------------------------------------------------------------


def on_device(size: str, *parts: tuple[str, Callable[[], object], int]) -> list[Row]:
    """Rows of (name, work, floor)."""
    return [Row(name, size, by_graph([work]), floor, "graph") for name, work, floor in parts]


def gates(batch: int, vocab: int) -> list[Row]:
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
        "depth": 2,
        "topk": 1,
        "joint": joint,
        "alive": alive,
        "num_kept": kept,
    }

    def inputs() -> tuple[Tensor, Any]:
        return draw(batch, vocab).mul_(4).bfloat16(), GateOutput.empty(batch, 1, "cuda")

    floor = nbytes(*inputs())
    # So many that 256 MB pass before one comes again and could be in the cache; 8 at most.
    sets = [inputs() for _ in range(min(max(256_000_000 // floor, 2), 8))]
    works = [partial(judge_layer, logits, program, out=out, **given) for logits, out in sets]
    in_torch = partial(judge_layer_reference, sets[0][0], program, out=sets[0][1], **given)
    size = f"B {batch}, V {vocab}"
    return [
        Row("gate of a layer", size, by_graph([*works]), floor, "graph"),
        Row("the same in torch", size, by_host(in_torch), floor, "host"),
    ]


def packing(batch: int) -> list[Row]:
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

    def lay_out() -> layout.Layout:
        given = lens, tokens, tokens, table, slots, seq_lens
        return layout.lay_out(*given, tokens=total, slots=batch, places=WIDTH)

    def accept() -> object:
        return accept_paths(packed_at.rows, tokens, lens, *here, longest=WIDTH, most=WIDTH)

    packed_at = lay_out()
    here = packed_at.row_starts, packed_at.window
    kv_bytes = 2 * indices.element_size() * (batch * PREFIX + total)
    return on_device(
        f"B {batch}, T {total}",
        ("forward laid out", lay_out, nbytes(lens, tokens, tokens, slots, seq_lens, packed_at)),
        ("accepted paths", accept, nbytes(packed_at.rows, tokens, lens, *here)),
        ("KV indices",
         lambda: kernels.ragged_kv_indices(table, slots, seq_lens, lens, starts, indices),
         kv_bytes),
        (f"logits unpacked, V {vocab}",
         lambda: kernels.scatter_rows(packed, lens, WIDTH, full), nbytes(packed, full)),
    )  # fmt: skip


def trees(batch: int, nodes: int = TREE) -> tuple[Tensor, Tensor]:
    """Random parents [B, N] int64 and rows [B] in [1, N]; padding is the root's child."""
    node = torch.arange(nodes)
    parents = (torch.rand(batch, nodes) * node).long()
    parents[:, 0] = -1
    return parents, torch.randint(1, nodes + 1, (batch,))


def masks(batch: int) -> list[Row]:
    """FlashInfer's packed tree mask, straight from parents."""
    from sglang_c2t.kernels import masks as kernels

    parents, num_rows = (tensor.cuda() for tensor in trees(batch))
    num_rows = num_rows.to(torch.int32)
    prefix = torch.full((batch,), PREFIX, device="cuda")
    words = kernels.ancestor_words_from_parents(parents, TREE)
    starts = kernels.mask_indptr(prefix, num_rows, batch)
    capacity = kernels.mask_capacity(batch * TREE, batch, PREFIX + TREE)
    out = torch.zeros(capacity, dtype=torch.uint8, device="cuda")
    return on_device(
        f"B {batch}, {TREE} nodes, L {PREFIX}",
        ("ancestor words", lambda: kernels.ancestor_words_from_parents(parents, TREE),
         nbytes(parents, words)),
        ("packed tree mask",
         lambda: kernels.pack_tree_mask(words, prefix, num_rows, starts, out),
         nbytes(words) + batch * -(-TREE * (PREFIX + TREE) // 8)),
    )  # fmt: skip


def transfer(batch: int) -> list[Row]:
    """Lengths to the host, which chooses the graph by their sum: the one wait of a step."""
    lens = torch.randint(1, WIDTH + 1, (batch,), dtype=torch.int32, device="cuda")
    pinned = torch.empty(batch, dtype=torch.int32, pin_memory=True)

    def through_pinned() -> None:
        pinned.copy_(lens, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return [
        Row("lengths to the host", f"B {batch}", by_host(lens.cpu), nbytes(lens), "host"),
        Row("the same, pinned", f"B {batch}", by_host(through_pinned), nbytes(lens), "host"),
    ]


def parts_of(batches: Sequence[int]) -> list[tuple[str, Callable[[], list[Row]]]]:
    """Everything, by name, in the order of a step."""
    parts: dict[str, Callable[[int], list[Row]]] = {
        **{f"gate, V {vocab}": partial(gates, vocab=vocab) for vocab in VOCABS},
        "packing": packing, "masks": masks, "transfer": transfer,
    }  # fmt: skip
    return [(name, partial(part, batch)) for batch in batches for name, part in parts.items()]


def line(row: Row, ceilings: Ceilings) -> str:
    """A line of the table."""
    micro = [1e6 * seconds for seconds in row.timing]
    floor = 1e6 * row.floor_bytes / ceilings.bytes_per_s
    factor = f"{micro[0] / floor:.1f}" if floor > 0.01 else "-"
    spread = f"{micro[0]:.1f} [{micro[1]:.1f}, {micro[2]:.1f}]"
    return markdown.row(row.part, [row.size, row.kind, spread, f"{floor:.2f}", factor])


COLUMNS = ["size", "timed", "us, median [10 %, 90 %]", "floor, us", "time / floor"]
HEADER = f"{markdown.row('part', COLUMNS)}\n{markdown.rule(3, words=3)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Time all parts; a part that fails is told and leaves the others alone."""
    parser = argparse.ArgumentParser(prog="python -m eval.gpu.microbench", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--ceilings", type=Path, help="from roofline.py; measured here without it")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--brief", action="store_true", help="only see whether all parts run")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("eval.gpu.microbench: needs a CUDA device", file=sys.stderr)
        return 2
    if args.brief:
        briefly()
    torch.manual_seed(0)
    ceilings = Ceilings.read(args.ceilings) if args.ceilings else measure()
    print(f"{ceilings.gpu}, copies at {ceilings.bytes_per_s / 1e12:.2f} TB/s\n\n{HEADER}")
    rows: list[Row] = []
    failed = []
    for name, part in parts_of(args.batches):
        try:
            found = part()
        except Exception as error:  # one missing kernel must not cost the other numbers
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        rows += found
        for row in found:
            print(line(row, ceilings), flush=True)
        torch.cuda.empty_cache()
    for told in failed:
        print(f"FAILED {told}", file=sys.stderr)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"ceilings": asdict(ceilings), "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

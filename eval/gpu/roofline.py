"""The least a decode step can take, from the bytes and operations of a model's shape.

    python -m eval.gpu.roofline --out runs/gpu/ceilings.json      # measures the two ceilings

A forward reads its weights and the keys and values of its batch once, and multiplies every
row with every weight; it cannot end before the slower of the two. Bandwidth and rate are those
that a large copy and a large matrix product reach on this very machine, not the data sheet's.
Activations, sampling, launches and the host count as nothing: what a step takes beyond its
floor is theirs.

Legend: B requests, R rows verified by the whole batch, D drafts per chain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from eval.gpu.models import BYTES_PER_WEIGHT, Shape
from eval.gpu.timing import by_events
from sglang_c2t.config import ConfigError


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches."""

    gpu: str
    bytes_per_s: float
    """Of a copy on the device, bytes read plus bytes written."""

    flops_per_s: float
    """Of a bfloat16 matrix product."""

    @classmethod
    def read(cls, path: Path) -> Ceilings:
        """From a file of :func:`main`; :class:`ConfigError` for any other."""
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} holds no ceilings of eval.gpu.roofline: {error}") from error


class Forward(NamedTuple):
    """Work of one forward."""

    num_bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The longer of moving the bytes and doing the operations."""
        return max(self.num_bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


def forward(
    shape: Shape, *, rows: float, batch: int, context: float, draft: bool = False
) -> Forward:
    """The target, or the draft head, on R ``rows`` of B requests with ``context`` tokens each."""
    weights = shape.draft_weights if draft else shape.target_weights
    layers = 1 if draft else shape.num_hidden_layers
    attention = 4 * rows * context * shape.num_attention_heads * shape.head_dim * layers
    return Forward(
        BYTES_PER_WEIGHT * weights + batch * context * layers * shape.layer_kv_bytes,
        2 * rows * weights + attention,
    )


# -- measuring ----------------------------------------------------------------------------


def measure(gib: float = 4, side: int = 8192) -> Ceilings:
    """Median of 20 copies of so many GiB and of 20 products of ``side`` cubed, on random data."""
    size = int(gib * 2**30)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    copy = by_events(torch.empty_like(source).copy_, source).median
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    product = by_events(torch.matmul, left, right).median
    return Ceilings(torch.cuda.get_device_name(), 2 * size / copy, 2 * side**3 / product)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the ceilings of this machine."""
    parser = argparse.ArgumentParser(prog="python -m eval.gpu.roofline", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON, for the report")
    parser.add_argument("--gib", type=float, default=4, help="size of a copy (%(default)s)")
    parser.add_argument("--side", type=int, default=8192, help="of a product (%(default)s)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("eval.gpu.roofline: needs a CUDA device", file=sys.stderr)
        return 2
    found = measure(args.gib, args.side)
    text = json.dumps(asdict(found))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The kernel that keeps the best drafts of a batch, against loops, on any device.

`test_budget` runs `main` by Triton's interpreter, in a process of its own, and calls the check by
itself for the twin, and for the kernel where there is a GPU.
"""

from __future__ import annotations

import random

import torch

from sglang_c2t.kernels.budget import chains_within


def slowly(survival: list[list[float]], drafts: int, whole: list[bool]) -> list[int]:
    """Oracle: pick the best draft so many times, of equals the shallower, then the first."""
    left = [
        (-value, depth, request)
        for request, chain in enumerate(survival)
        for depth, value in enumerate(chain)
        if not whole[request]
    ]
    kept = sorted(left)[:drafts]
    return [
        1 + (len(chain) if whole[request] else sum(1 for *_, r in kept if r == request))
        for request, chain in enumerate(survival)
    ]


def check(rng: random.Random, batch: int, layers: int, device: str = "cpu") -> None:
    """A random batch with many equal survivals, every budget, with and without whole drafts."""
    steps = rng.choice([2, 10, 1000])
    survival = []
    for _ in range(batch):
        chain = sorted((rng.randrange(steps + 1) / steps for _ in range(layers)), reverse=True)
        survival.append(torch.tensor(chain).tolist())  # as float32 has them
    whole = [rng.random() < 0.2 for _ in range(batch)]
    values = torch.tensor(survival, device=device)
    for drafts in {0, 1, batch, batch * layers, batch * layers + 3, rng.randrange(batch * layers)}:
        for chosen in (None, whole):
            mask = None if chosen is None else torch.tensor(chosen, device=device)
            width = layers + rng.randint(1, 3)
            found, links = chains_within(values, drafts, width, mask)
            # As a table of more layers holds them.
            table = torch.nn.functional.pad(values, (0, 3), value=1.0)
            again = chains_within(table, drafts, width, mask, layers=layers)
            assert again[0].equal(found)
            assert again[1].equal(links)
            assert (found.dtype, links.dtype) == (torch.int32, torch.int64)
            rows = slowly(survival, drafts, chosen or [False] * batch)
            assert found.tolist() == rows, (survival, drafts, chosen)
            ends = [[*range(1, n), *[-1] * (width + 1 - n)] for n in rows]
            assert links.tolist() == ends


def main() -> None:
    """Batches of all sizes around the kernel's blocks."""
    rng = random.Random(0)
    for batch, layers in ((1, 1), (1, 8), (2, 5), (31, 2), (32, 5), (33, 2), (70, 8)):
        check(rng, batch, layers)

"""One decision for all tensor-parallel ranks: rank 0's.

Draft logits can differ in the last bit between ranks; a length that differs would make
their next collective hang. SGLang broadcasts its own accept decisions the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor


def ranks() -> int:
    """How many tensor-parallel ranks serve one model."""
    return int(get_parallel().tp_group.world_size)


def agreement() -> Callable[[Tensor], Tensor] | None:
    """A function that makes a tensor equal on all ranks; ``None`` on one rank."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return None
    return lambda decision: group.broadcast(decision, src=0)


def host_agreement() -> Callable[[list[int]], list[int]] | None:
    """A function that gives all ranks rank 0's integers, between hosts; ``None`` on one rank."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return None

    def agree(numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.broadcast(told, src=group.ranks[0], group=group.cpu_group)
        return told.tolist()

    return agree

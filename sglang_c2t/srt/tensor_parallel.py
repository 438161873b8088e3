"""Broadcasts rank 0's decisions to all ranks that share requests. Draft logits may differ in the
last bit between ranks, and different lengths would hang the next collective. SGLang broadcasts its
own accept decisions in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor


def tp_group() -> Any:
    """Return the tensor-parallel ranks that share this one's requests. Data-parallel attention
    splits them into smaller groups.
    """
    parallel = get_parallel()
    return parallel.attn_tp_group if parallel.attn_dp_size > 1 else parallel.tp_group


def all_ranks() -> Any:
    """The group of all ranks of a model."""
    return get_parallel().tp_group


def broadcast_from_rank0() -> Callable[[Tensor], Tensor] | None:
    """Return a function that broadcasts rank 0's tensor; ``None`` if one rank has the requests."""
    group = tp_group()
    if group.world_size == 1:
        return None
    return lambda decision: group.broadcast(decision, src=0)


def host_broadcast_from_rank0(group: Any = None) -> Callable[[list[int]], list[int]] | None:
    """Return a function that broadcasts integers of a ``group``'s first rank between hosts.
    ``None`` on one rank. The default group are the ranks that share requests.
    """
    group = group or tp_group()
    if group.world_size == 1:
        return None

    def agree(numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.broadcast(told, src=group.ranks[0], group=group.cpu_group)
        return told.tolist()

    return agree

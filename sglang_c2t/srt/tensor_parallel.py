"""One decision for all ranks that share requests: the first one's.

Draft logits can differ in the last bit between ranks; a length that differs would make
their next collective hang. SGLang broadcasts its own accept decisions the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor


def tp_group() -> Any:
    """The group of ranks that share this one's requests: the tensor-parallel ones, of which data
    parallel attention leaves some or none.
    """
    parallel = get_parallel()
    return parallel.attn_tp_group if parallel.attn_dp_size > 1 else parallel.tp_group


def all_ranks() -> Any:
    """The group of all ranks of a model."""
    return get_parallel().tp_group


def broadcast_from_rank0() -> Callable[[Tensor], Tensor] | None:
    """A function that makes a tensor equal on all ranks that share requests; ``None`` on one."""
    group = tp_group()
    if group.world_size == 1:
        return None
    return lambda decision: group.broadcast(decision, src=0)


def host_broadcast_from_rank0(group: Any = None) -> Callable[[list[int]], list[int]] | None:
    """A function that gives all ranks of a ``group`` its first one's integers, between hosts;
    ``None`` on one rank. The group is of those that share requests, if none is given.
    """
    group = group or tp_group()
    if group.world_size == 1:
        return None

    def agree(numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.broadcast(told, src=group.ranks[0], group=group.cpu_group)
        return told.tolist()

    return agree

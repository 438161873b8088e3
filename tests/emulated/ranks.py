"""Collectives between emulated devices, one a process: gloo's, done when their turn comes.

Ranks whose operations differ, by what is done or by how much of it, hang on GPUs; here that is a
:class:`~tests.emulated.kernels.Defect` on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.emulated.device import launch
from tests.emulated.kernels import Defect


class Communicator:
    """In place of SGLang's ``PyNcclCommunicator``: tensors lie on the device."""

    disabled, available, nccl_version = False, True, 22700

    def __init__(self, group: dist.ProcessGroup, device: Any, **_: Any) -> None:
        self.device, self.rank = device, dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Not the given one: hosts talk over that in an order of their own.
        self._group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")

    def change_state(self, enable: bool | None = None) -> Any:
        """It is always on."""
        del enable
        return nullcontext()

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """In place."""
        self._launch("all_reduce", lambda t: dist.all_reduce(t, op, self._group), tensor)

    def outplace_all_reduce(self, in_tensor: Tensor, out_tensor: Tensor | None = None) -> Tensor:
        """Into another tensor."""
        out = torch.empty_like(in_tensor) if out_tensor is None else out_tensor
        out.copy_(in_tensor)
        self.all_reduce(out)
        return out

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """From the group's rank ``src``."""
        source = dist.get_global_rank(self._group, src)
        self._launch("broadcast", lambda t: dist.broadcast(t, source, self._group), tensor)

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Concatenate the ranks' tensors in order."""

        def gather(out: Tensor, mine: Tensor) -> None:
            parts = [torch.empty_like(mine) for _ in range(self.world_size)]
            dist.all_gather(parts, mine, self._group)
            out.copy_(torch.cat(parts).view_as(out))

        self._launch("all_gather", gather, output_tensor, input_tensor)

    def reduce_scatter(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """To each rank its part of the sum."""

        def scatter(out: Tensor, mine: Tensor) -> None:
            dist.all_reduce(mine := mine.clone(), group=self._group)
            out.copy_(mine.view(self.world_size, -1)[self.rank].view_as(out))

        self._launch("reduce_scatter", scatter, output_tensor, input_tensor)

    def _launch(self, name: str, work: Callable[..., object], *tensors: Tensor) -> None:
        def together(*seen: Tensor) -> None:
            self._agree(name, seen[-1].numel())
            into = [t if t.is_contiguous() else t.contiguous() for t in seen]
            work(*into)
            for tensor, written in zip(seen, into, strict=True):
                if tensor is not written:
                    tensor.copy_(written)

        launch(f"nccl {name}", together, *tensors)

    def _agree(self, name: str, size: int) -> None:
        mine = torch.tensor([len(name), size])
        others = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(others, mine, self._group)
        if any(not torch.equal(other, mine) for other in others):
            raise Defect(f"ranks differ: {[other.tolist() for other in others]} at {name}")


@contextmanager
def connected() -> Iterator[None]:
    """SGLang's ranks talk so inside the block."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl

    coordinator = parallel_state.GroupCoordinator
    of_host = coordinator.broadcast

    def broadcast(group: Any, input_: Tensor, src: int = 0) -> Tensor:
        """In the order of the stream, also where a release asks torch, whose gloo does not wait."""
        if not input_.is_cuda or group.world_size == 1:
            return of_host(group, input_, src)
        if group.pynccl_comm is not None:
            group.pynccl_comm.broadcast(input_, src)
            return input_
        first, hosts = group.ranks[src], group.cpu_group
        launch("broadcast", lambda t: dist.broadcast(t, first, hosts), input_)
        return input_

    with (
        patch.object(pynccl, "PyNcclCommunicator", Communicator),
        patch.object(coordinator, "broadcast", broadcast),
    ):
        yield


def whole(heads: Tensor, group: Any) -> Tensor:
    """[L, G, D] of all ranks' heads, from the host's [L, G / ranks, D]."""
    if group.world_size == 1:
        return heads
    parts = [torch.empty_like(heads) for _ in range(group.world_size)]
    dist.all_gather(parts, heads.contiguous(), group.cpu_group)
    return torch.cat(parts, dim=1)

"""A CUDA device without one: shapes and devices are checked, nothing is computed.

Torch's fake tensors know where they would be. What a step on a GPU must not do shows on them:
read the device on the host, copy between the two, make a tensor whose shape is data. Kernels of
Triton are replaced by a look at their arguments. Every launch is named, so that a test can say
how many a step may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

aten = torch.ops.aten

#: What costs no launch beside the views, which say so themselves.
FREE = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten._unsafe_view.default,
    aten.detach.default,
    aten.lift_fresh.default,
}
#: These look their indices up one by one: a mask has to be counted on the host first.
LOOK_UPS = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class HostRead(AssertionError):
    """The host waits for the device, or a pageable copy does."""


class Launches(TorchDispatchMode):
    """Names every kernel launched on the device inside the block.

    Raises:
        HostRead: The block reads the device, or copies between device and host.
    """

    watching: ClassVar[Launches | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __enter__(self) -> Launches:
        Launches.watching = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Launches.watching = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            result = function(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise HostRead(f"{function} reads the device") from error
        if function.namespace == "prim":  # asks a tensor for its device or layout
            return result
        given = _tensors((args, kwargs))
        touched = [*given, *_tensors(result)]
        if not any(t.device.type == "cuda" for t in touched):
            return result
        # Numbers travel with the launch; all else on the host has to be copied first.
        if any(t.device.type == "cpu" and t.dim() > 0 for t in touched):
            raise HostRead(f"{function} copies between host and device")
        if function in LOOK_UPS and any(t.dtype == torch.bool for t in _tensors(args[1])):
            raise HostRead(f"{function} by a mask reads the device")
        if not function.is_view and function not in FREE:
            self.names.append(str(function))
        return result


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors made on ``cuda`` inside the block are fakes, and Triton launches nothing."""
    with monkeypatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(JITFunction, "run", _look_at_arguments)
        yield


def _look_at_arguments(
    kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any
) -> None:
    """In place of a launch: arguments bind, tensors lie on the device, the grid is not empty."""
    name = kernel.fn.__name__
    options = {"num_warps", "num_stages"}
    kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in options})
    for tensor in _tensors((args, kwargs)):
        assert tensor.is_cuda, f"{name} is given a tensor of the host"
    size = grid({}) if callable(grid) else grid
    assert all(isinstance(n, int) and n > 0 for n in size), f"{name} runs on a grid {size}"
    if Launches.watching is not None:
        Launches.watching.names.append(name)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]

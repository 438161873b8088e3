"""Triton over the emulated device: its interpreter, one launch behind the other's.

Kernels that are decorated while ``TRITON_INTERPRET=1`` run in the interpreter, on the memory
itself. Some have a reference in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver, interpreter

from tests.emulated.device import CUDA, DEVICE, launch
from tests.emulated.references import TRITON
from tests.interpreter import hastened
from tests.triton_keys import key_of


class _Driver:
    """Properties of the device that Triton reads."""

    utils = SimpleNamespace(
        get_device_properties=lambda *_: {
            "multiprocessor_count": 132, "max_shared_mem": 232_448, "warpSize": 32,
            "max_num_regs": 65_536,
        }
    )  # fmt: skip

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, _: int) -> None:
        pass

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_empty_cache_for_benchmark(self) -> None:
        return None


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton's kernels run on the emulated device: for a process of its own, whose driver stays."""
    run = interpreter.InterpretedFunction.run

    def queued(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        name = self.fn.__name__
        if self.fn.__module__.startswith("sglang_c2t."):
            DEVICE.compile(name, key_of(self, args, kwargs))
        if not warmup:
            kernel = TRITON.get(name) or functools.partial(run, self, grid=grid, warmup=False)
            launch(f"triton {name}", kernel, *args, **kwargs)

    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    def nothing(**_: Any) -> None:
        """One launch is behind the other anyway."""

    with (
        hastened(),
        patch.multiple(tl.extra.cuda, gdc_wait=nothing, gdc_launch_dependents=nothing),
        patch.object(interpreter.InterpretedFunction, "run", queued),
        patch.object(autotuner.Autotuner, "run", first_configuration),
    ):
        driver.set_active(_Driver())
        yield

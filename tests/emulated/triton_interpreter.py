"""Triton over the emulated device: its interpreter, one launch behind the other's.

Kernels that are decorated while ``TRITON_INTERPRET=1`` run in the interpreter, on the memory
itself. Its patches of the language are left in place for as long as the block lasts: making and
undoing them is most of the time of a small kernel. Some have a reference in their place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver, interpreter

from tests.emulated.device import CUDA, DEVICE, launch
from tests.emulated.references import TRITON
from tests.triton_keys import key_of


class _Driver:
    """What Triton asks about the device."""

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


class _Stays:
    """Language patches that nobody takes back."""

    def restore(self) -> None:
        pass


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton's kernels run on the emulated device: for a process of its own, whose driver stays."""
    run = interpreter.InterpretedFunction.run
    patch_language, patched = interpreter._patch_lang, set()

    def queued(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        name = self.fn.__name__
        if self.fn.__module__.startswith("sglang_c2t."):
            DEVICE.compile(name, key_of(self, args, kwargs))
        if not warmup:
            kernel = TRITON.get(name) or functools.partial(run, self, grid=grid, warmup=False)
            launch(f"triton {name}", kernel, *args, **kwargs)

    def patched_once(function: Any) -> _Stays:
        if id(function.__globals__) not in patched:
            patch_language(function)
            patched.add(id(function.__globals__))
        return _Stays()

    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    executor = interpreter.GridExecutor
    with ExitStack() as stack:
        for owner, name, instead in (
            (interpreter.InterpretedFunction, "run", queued),
            (interpreter, "_patch_lang", patched_once),
            (executor, "_init_args_hst", lambda _, args, kwargs: (list(args), dict(kwargs))),
            (executor, "_restore_args_dev", lambda *_: None),
            (autotuner.Autotuner, "run", first_configuration),
            (inspect, "getfullargspec", functools.lru_cache(None)(inspect.getfullargspec)),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        driver.set_active(_Driver())
        yield

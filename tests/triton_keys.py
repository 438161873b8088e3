"""Triton's compile key of a launch, from the function that its own launcher calls."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction


def key_of(
    kernel: InterpretedFunction, args: Sequence[Any], settings: Mapping[str, Any]
) -> tuple[Hashable, ...]:
    """Two launches of one key share what was compiled: name, constants, and of each argument type,
    alignment and whether it is 1 or a multiple of 16.
    """
    signature = inspect.signature(kernel.fn)
    named = {name: value for name, value in settings.items() if name in signature.parameters}
    fixed = kernel.kwargs["do_not_specialize"] or ()
    anywhere = kernel.kwargs["do_not_specialize_on_alignment"] or ()
    key: list[Hashable] = [kernel.fn.__name__]
    for name, value in signature.bind(*args, **named).arguments.items():
        if "constexpr" in str(signature.parameters[name].annotation):
            key.append((name, value))
        else:
            how = False, name not in fixed, name not in anywhere
            key.append((name, native_specialize_impl(CUDABackend, value, *how)))
    return tuple(key)

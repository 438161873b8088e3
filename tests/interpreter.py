"""Triton's interpreter without what takes it most of its time, for a process of its own.

Most of a small kernel's time goes to patches of the language that are made and undone around each
launch, and to sums that only a debugger looks at. Results are the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import triton.language as tl
from triton.runtime import interpreter


class _Stays:
    """Language patches that stay in place."""

    def restore(self) -> None:
        pass


@contextmanager
def hastened() -> Iterator[None]:
    """Kernels run on the memory of the host itself. The language stays patched behind the block."""
    patch_language, patched = interpreter._patch_lang, set()
    numpy_type = functools.cache(interpreter._get_np_dtype)
    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder

    def patched_once(function: Any) -> _Stays:
        if id(function.__globals__) not in patched:
            patch_language(function)
            patched.add(id(function.__globals__))
        return _Stays()

    def numpy_type_once(of: Any) -> Any:
        scalar = of.scalar
        return numpy_type(tl.uint64 if isinstance(scalar, tl.pointer_type) else scalar)

    with ExitStack() as stack:
        for owner, name, instead in (
            # Whether integers overflow is computed, and then asserted where one debugs only.
            (builder, "options", replace(builder.options, sanitize_overflow=False)),
            (interpreter, "_patch_lang", patched_once),
            (interpreter, "_get_np_dtype", numpy_type_once),
            (executor, "_init_args_hst", lambda _, args, kwargs: (list(args), dict(kwargs))),
            (executor, "_restore_args_dev", lambda *_: None),
            (inspect, "getfullargspec", functools.cache(inspect.getfullargspec)),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        yield

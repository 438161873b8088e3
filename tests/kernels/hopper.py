"""Ahead-of-time compilation for an H100, which needs no GPU.

Finds what Triton's interpreter lets through: types that do not match at a branch or a loop,
and arguments equal to 1, which the compiler makes constants of.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


def compiled(kernel: Any, *arguments: torch.dtype | int, **constants: Any) -> Any:
    """The kernel for compute capability 9.0, as a launch with such arguments would compile it.

    ``arguments`` are dtypes, for tensors, and ints. Returns Triton's compiled kernel; its
    ``asm`` holds "ptx" and "cubin".
    """
    names = [name for name in kernel.arg_names if name not in constants]
    signature: dict[str, str] = dict.fromkeys(kernel.arg_names, "constexpr")
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument, torch.dtype):
            signature[name] = POINTERS[argument]
        elif argument == 1:
            constants[name] = 1
        else:
            signature[name] = "i32"
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))

"""Ahead-of-time compilation for an H100, which needs no GPU.

Finds what Triton's interpreter lets through: types that do not match at a branch or a loop,
arguments equal to 1, which the compiler makes constants of, and kernels that spill registers.
"""

from __future__ import annotations

import subprocess
import tempfile
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
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}
SCALARS = {int: "i32", float: "fp32"}


def compiled(kernel: Any, *arguments: torch.dtype | float | None, **constants: Any) -> Any:
    """The kernel for compute capability 9.0, as a launch with such arguments would compile it.

    ``arguments`` are dtypes, for tensors, numbers, and None for a tensor that is not there.
    Returns Triton's compiled kernel; its ``asm`` holds "ptx" and "cubin".
    """
    names = [name for name in kernel.arg_names if name not in constants]
    signature: dict[str, str] = dict.fromkeys(kernel.arg_names, "constexpr")
    attrs = {}
    for name, argument in zip(names, arguments, strict=True):
        place = kernel.arg_names.index(name)
        if argument is None or argument == 1:
            constants[name] = argument
            continue
        is_tensor = isinstance(argument, torch.dtype)
        signature[name] = POINTERS[argument] if is_tensor else SCALARS[type(argument)]
        # What a launch finds out by itself; tensors start at multiples of 16.
        if is_tensor or (isinstance(argument, int) and argument % 16 == 0):
            attrs[place,] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


def require_no_spills(kernel: Any, registers: int = 128) -> None:
    """Nor more ``registers`` a thread: with 128 four blocks of 128 threads share a multiprocessor,
    with 256 two do.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        said = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    fields = next(line for line in said.splitlines() if "REG:" in line).split()
    used = {name: int(value) for name, value in (f.split(":") for f in fields if "[" not in f)}
    assert used["LOCAL"] == used["STACK"] == 0, f"spills: {used}"
    assert used["REG"] <= registers, f"too many registers: {used}"

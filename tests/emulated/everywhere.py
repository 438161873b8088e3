"""The emulated device in whatever process imports torch, from then on and for good.

``site/sitecustomize.py`` calls :func:`install` in every Python process whose PYTHONPATH names that
folder, those that SGLang's launcher spawns included. A process that never imports torch pays a
few milliseconds.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from tests.emulated.imports import behind

#: GiB that other processes leave on the device. What SGLang takes of it is memory of the host.
FREE_GIB = "EMULATED_FREE_GIB"

#: MiB that a process may allocate on the device; one more is an out-of-memory error.
LIMIT_MIB = "EMULATED_LIMIT_MIB"

#: Left open: a process keeps its device until it ends.
_kept = ExitStack()


def install() -> None:
    """The device comes with torch."""
    behind(("torch",), _device)


def _device() -> None:
    from tests.emulated import libraries, torch_cuda
    from tests.emulated.device import DEVICE
    from tests.emulated.memory import Block

    if limit := os.environ.get(LIMIT_MIB):
        Block.limit = int(float(limit) * 2**20)
    free = int(float(os.environ.get(FREE_GIB, "1")) * 2**30)
    _kept.enter_context(torch_cuda.installed(free))
    # Orders are what test_serving.py is for. As late as can be SGLang alone, without speculation on
    # FlashInfer, plans a step in pinned memory that the step before has still to copy.
    DEVICE.in_turn = True
    _kept.enter_context(torch_cuda.compiled_as_it_is())
    _kept.enter_context(libraries.without_libraries())
    libraries.define_operations()
    behind(("triton",), _triton)  # torch has mostly imported it
    behind(("sgl_kernel", "flashinfer", "sglang.kernels"), _kernels)
    behind(("sglang_c2t.kernels.rows",), small_grids)
    behind(("sglang_c2t.srt.draft.seeding",), rough_prices)


def _kernels() -> None:
    from tests.emulated import libraries

    _kept.enter_context(libraries.served())


def _triton() -> None:
    from tests.emulated import triton_interpreter

    _kept.enter_context(triton_interpreter.interpreted())


def small_grids() -> None:
    """Few blocks of a launch, which the interpreter runs one by one."""
    from sglang_c2t.kernels import rows

    rows.FULL_GRID = 4


def rough_prices() -> None:
    """Little time for prices of steps, which say nothing here."""
    from sglang_c2t.srt.draft import seeding

    seeding.SECONDS = 0.5

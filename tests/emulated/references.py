"""What three Triton kernels compute, in torch: interpreted, they were half of a decode step.

They are checked as they are elsewhere: ours under ``tests/kernels``, SGLang's by SGLang. Each is
given the kernel's own arguments, tensors as the host sees them, when its launch is due.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor


def logit_partials(*_: Any, **__: Any) -> None:
    """Nobody but ``judge`` reads what it leaves."""


def judge(
    logits: Tensor, row_stride: int, vocab: int, maxima: Tensor, partials: Tensor, program: Tensor,
    depth: float, joint: Tensor | None, alive: Tensor | None, token_map: Tensor | None,
    num_kept: Tensor | None, sure: Tensor | None, table: Tensor | None, slots: Tensor | None,
    num_slots: int, *out: Tensor, NAMES: tuple[str, ...], HIDDEN: int, DEPTHS: int, K: int,
    WIDTH: int, **_: Any,
) -> None:  # fmt: skip
    """The gate's twin."""
    # Not before: whoever imports it may be what brings Triton, and with it these references.
    from sglang_c2t.kernels.gate import FusedGate, GateOutput, Relay, judge_layer_reference

    gate = FusedGate.__new__(FusedGate)  # over the kernel's own buffer
    gate.names, gate.buffer = tuple(dict.fromkeys(NAMES)), program
    gate.hidden_size, gate.num_depths, gate.running = HIDDEN, DEPTHS, sure is not None
    judge_layer_reference(
        logits, gate, depth=int(depth), topk=K, joint=joint, alive=alive, token_map=token_map,
        num_kept=num_kept, sure=sure, out=GateOutput(*out), width=WIDTH,
        relay=None if table is None or slots is None else Relay(table, slots),
    )  # fmt: skip


def copy_slots(
    addresses: Tensor, strides: Tensor, targets: Tensor, sources: Tensor, count: int,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    """In each of these buffers ``count`` rows of so many bytes go elsewhere, all at once."""
    sources, targets = sources[:count].tolist(), targets[:count].tolist()
    for address, size in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * size, size) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + target * size, row, size)


#: By the kernel's name.
TRITON: dict[str, Callable[..., None]] = {
    "copy_all_layer_kv_cache_tiled": copy_slots,
    "judge": judge,
    "logit_partials": logit_partials,
}

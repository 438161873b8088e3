"""References in torch of some Triton kernels: interpreted, they took half of a decode step.

They are checked as they are elsewhere: ours under ``tests/kernels``, SGLang's by SGLang. Each is
given the kernel's own arguments, tensors as the host sees them, when its launch is due.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor


def logit_partials(*_: Any, **__: Any) -> None:
    """Only ``judge`` reads its result."""


def judge(
    logits: Tensor, row_stride: int, vocab: int, maxima: Tensor, partials: Tensor, program: Tensor,
    depth: float, joint: Tensor | None, alive: Tensor | None, token_map: Tensor | None,
    num_kept: Tensor | None, table: Tensor | None, slots: Tensor | None,
    num_slots: int, *out: Tensor, NAMES: tuple[str, ...], HIDDEN: int, K: int, WIDTH: int, **_: Any,
) -> None:  # fmt: skip
    """The gate's twin."""
    # Not before: whoever imports it may be what brings Triton, and with it these references.
    from sglang_c2t.kernels.gate import judge_layer_reference
    from sglang_c2t.kernels.gate_program import FusedGate, GateOutput, Relay

    gate = FusedGate.__new__(FusedGate)  # over the kernel's own buffer
    gate.names, gate.buffer, gate.hidden_size = tuple(NAMES), program, HIDDEN
    judge_layer_reference(
        logits, gate, depth=int(depth), topk=K, joint=joint, alive=alive, token_map=token_map,
        num_kept=num_kept, out=GateOutput(*out), width=WIDTH,
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


def experts(
    x: Tensor, _x_desc: None, weights: Tensor, _desc: None, _bias: None, out: Tensor,
    _x_scale: None, _scale: None, shares: Tensor, routes: Tensor, blocks: Tensor, padded: Tensor,
    _mask: Any, _n: int, _k: int, _em: int, count: int, *_: Any, BLOCK_SIZE_M: int,
    MUL_ROUTED_WEIGHT: bool, top_k: int, **__: Any,
) -> None:  # fmt: skip
    """Rows of ``x`` times the weights [E, N, K] of the expert that their route says, by blocks of
    routes, of which ``count`` are real; ``top_k`` routes of each row.
    """
    table = out.view(-1, out.shape[-1])
    for start in range(0, int(padded), BLOCK_SIZE_M):
        mine = routes[start : start + BLOCK_SIZE_M].long()
        mine = mine[mine < count]
        values = x[mine // top_k].float() @ weights[int(blocks[start // BLOCK_SIZE_M])].float().T
        if MUL_ROUTED_WEIGHT:
            values *= shares.flatten()[mine][:, None]
        table[mine] = values.to(out.dtype)


#: By the kernel's name.
TRITON: dict[str, Callable[..., None]] = {
    "copy_all_layer_kv_cache_tiled": copy_slots,
    "fused_moe_kernel": experts,
    "judge": judge,
    "logit_partials": logit_partials,
}

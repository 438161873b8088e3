"""Matrix products with weights packed by oneDNN, for CPUs on which SGLang packs none.

torch multiplies float32 weights as they lie in memory. For few rows that is slow: all products of
SmolLM2-135M take 1.9 times as long for 4 rows as for 1, and 2.7 times for 8. Packed, they take 1.3
and 1.5 times (one core of an Intel Xeon with AVX-512), as on a device that waits for memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

FEWEST_ROWS = 4  # below, torch's own product is as fast
SMALLEST = 1 << 18  # elements; a call costs 16 us more, and small weights stay in the cache
ROWS_HINT = 16  # the layout that oneDNN chooses for these rows was fast from 4 to 512

_updates = 0


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """Whether this CPU and torch multiply packed weights of a dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def forget() -> None:
    """Pack every weight again at its next use, because values may have changed."""
    global _updates
    _updates += 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, [..., out], of x [..., in] and weight [out, in].

    The packed copy is made at first use, lies beside the weight and is as large. With it, the
    result of a row does not depend on the number of rows.
    """
    rows = x.numel() // x.shape[-1]
    if rows < FEWEST_ROWS or weight.numel() < SMALLEST or not available(weight.dtype):
        return functional.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, _packed(weight), bias, "none", [], "")
    return product


def _packed(weight: Tensor) -> Tensor:
    made, packed = getattr(weight, "c2t_packed", (-1, weight))
    if made != _updates:
        with torch.no_grad():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        weight.c2t_packed = (_updates, packed)  # type: ignore[attr-defined]
    result: Tensor = packed
    return result

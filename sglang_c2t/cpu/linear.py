"""Matrix products with weights packed by oneDNN, for CPUs on which SGLang packs none.

torch multiplies float32 weights as they lie in memory. For few rows that is slow: on one core of an
AMD EPYC all products of SmolLM2-135M take 45 ms for 1 row, 79 for 2 and 73 for 8. Packed, they take
39, 46 and 40, because reading the weights takes most of the time.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

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


def pack(weight: Tensor) -> None:
    """Pack a weight that was just loaded, if :func:`linear` would. The copy is as large. It is an
    attribute of the weight, so that models which share a weight share it.
    """
    if _is_packed(weight):
        _pack_anew(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, [..., out], of x [..., in] and weight [out, in].

    From 4 rows on, the result of a row does not depend on the rows beside it.
    """
    if not _is_packed(weight):
        return functional.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, _packed(weight), bias, "none", [], "")
    return product


def _is_packed(weight: Tensor) -> bool:
    return weight.numel() >= SMALLEST and available(weight.dtype)


def _packed(weight: Tensor) -> Tensor:
    made, packed = getattr(weight, "c2t_packed", (None, weight))
    return packed if made == _version(weight) else _pack_anew(weight)


def _pack_anew(weight: Tensor) -> Tensor:
    with torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    weight.c2t_packed = (_version(weight), packed)  # type: ignore[attr-defined]
    return packed


def _version(weight: Tensor) -> tuple[int, int]:
    return _updates, weight.data_ptr()

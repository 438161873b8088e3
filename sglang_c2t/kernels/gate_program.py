"""The gate's kernels as data: a network, a threshold, and the tables of a layer.

Weights and threshold are in one device buffer, so a captured CUDA graph reads new ones at its next
replay. Legend: R rows, K topk, S request slots, F features, H hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

MAX_TOPK = 16
MAX_HIDDEN = 64

#: Inputs of a gate; names and meanings are the classifier's.
FEATURES = (
    "joint", "log_joint", "prob", "margin", "entropy", "depth", "parent_rank", "rank",
)  # fmt: skip


class GateOutput(NamedTuple):
    """The K best children of each row, best first."""

    tokens: Tensor
    """[R, K] int64: target token ids."""

    prob: Tensor
    """[R, K] float32: draft probability at temperature 1."""

    joint: Tensor
    """[R, K] float32: product of ``prob`` along the path, this token included."""

    confidence: Tensor
    """[R, K] float32: compared with beta."""

    keep: Tensor
    """[R, K] bool: the parent is alive and the confidence reaches beta."""

    entropy: Tensor
    """[R] float32, nats: of the full distribution."""

    @classmethod
    def empty(cls, rows: int, topk: int, device: torch.device | str) -> GateOutput:
        """Allocate the tables of a layer."""
        kinds = cls.kinds(rows, topk)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds))

    @staticmethod
    def kinds(rows: int, topk: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each field."""
        dtypes = (torch.int64, *(torch.float32,) * 3, torch.bool)
        return [*(((rows, topk), dtype) for dtype in dtypes), ((rows,), torch.float32)]


class Relay(NamedTuple):
    """A table with a column per request slot that keeps a layer's values for the next step."""

    table: Tensor
    """[1 + 2 K, S] float32: entropy, then ``prob`` and ``confidence`` of the K best."""

    slots: Tensor
    """[R] integers: the column of each row."""


class Weights(NamedTuple):
    """A network of one hidden layer, ``sigmoid(out @ relu(hidden @ x))``, on any device. The order
    is that of ``ConfidenceNet.parameters()``.
    """

    hidden_weight: Tensor  # [H, F]
    hidden_bias: Tensor  # [H]
    out_weight: Tensor  # [1, H]
    out_bias: Tensor  # [1]


class FusedGate:
    """A network and a threshold, in device memory that captured graphs keep reading.

    Args:
        names: Features in the network's order, of :data:`FEATURES`. Without a network exactly one,
            which is the confidence (``joint``: DyJoint, ``prob``: DyMax).
        weights: The network, or ``None``.
        beta: Least confidence of a kept token.
        device: Device of the logits.
        sign: Without a network: -1 negates the feature, so that it must not exceed minus beta.

    Raises:
        ValueError: See :meth:`refusal`; or weights of other shapes.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Weights | None,
        *,
        beta: float,
        device: torch.device | str,
        sign: int = 1,
    ) -> None:
        self.names = tuple(names)
        self.hidden_size = 0 if weights is None else weights.hidden_weight.shape[0]
        reason = self.refusal(self.names, (self.hidden_size,) if self.hidden_size else ())
        if reason is not None:
            raise ValueError(reason)
        size = 2 + (2 + len(self.names)) * self.hidden_size
        #: float32. With a network [2 + 2 H + F H]: beta, out_bias, hidden_bias, out_weight, and
        #: hidden_weight transposed, because the kernel adds one feature to all units at once.
        #: Without one: beta and the sign.
        self.buffer = torch.zeros(size, dtype=torch.float32, device=device)
        self.set_beta(beta)
        if weights is not None:
            self.load(weights)
        else:
            self.buffer[1].fill_(sign)

    @staticmethod
    def refusal(names: Sequence[str], hidden_sizes: Sequence[int]) -> str | None:
        """Return why the kernels cannot run such a gate; ``None`` if they can."""
        strange = [name for name in names if name not in FEATURES]
        if strange:
            return f"the gate kernel reads {', '.join(FEATURES)}, not {', '.join(strange)}"
        if len(hidden_sizes) > 1 or not all(1 <= size <= MAX_HIDDEN for size in hidden_sizes):
            return (
                f"the gate kernel runs one hidden layer of at most {MAX_HIDDEN} units, "
                f"got {list(hidden_sizes)}"
            )
        if not hidden_sizes and len(names) != 1:
            return f"without a network one feature is the confidence, got {tuple(names)}"
        return None

    def fits(self, other: FusedGate) -> bool:
        """Whether kernels compiled for ``other`` can run this one, which differs in data only."""
        return (self.names, self.hidden_size) == (other.names, other.hidden_size)

    def load(self, weights: Weights) -> None:
        """Write new weights into the buffer, in one copy on the current stream."""
        hidden = self.hidden_size
        shapes = [tuple(t.shape) for t in weights]
        expected = [(hidden, len(self.names)), (hidden,), (1, hidden), (1,)]
        if hidden == 0 or shapes != expected:
            raise ValueError(f"this gate's weights have the shapes {expected}, got {shapes}")
        parts = weights.out_bias, weights.hidden_bias, weights.out_weight, weights.hidden_weight.T
        self.buffer[1:].copy_(torch.cat([part.detach().float().flatten() for part in parts]))

    def set_beta(self, beta: float) -> None:
        """Write a new threshold into the buffer, on the current stream."""
        self.buffer[0].fill_(beta)

    @cached_property
    def beta(self) -> Tensor:
        """[] float32: a view of the buffer, as :attr:`weights`."""
        return self.buffer[0]

    @cached_property
    def weights(self) -> Weights:
        """The network in the buffer, as views that later writes change."""
        hidden = self.hidden_size
        _, out_bias, hidden_bias, out_weight, columns = self.buffer.split(
            [1, 1, hidden, hidden, len(self.names) * hidden]
        )
        return Weights(columns.view(-1, hidden).T, hidden_bias, out_weight[None], out_bias)

    @cached_property
    def sign(self) -> Tensor:
        """[] float32: the sign of the feature, without a network."""
        return self.buffer[1]

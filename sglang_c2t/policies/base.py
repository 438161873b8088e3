"""Interfaces of policies: rules that decide, layer by layer, which drafts stay.

The gate calls a policy once per drafted layer, for the whole batch. In chains the caller keeps the
running conjunction, so a chain that has ended stays ended. This is Algorithm 1 of C2T
(arXiv:2502.13652), restricted to one child per node. In trees the caller drops all descendants of
a dropped node.

Every rule here is lossless, because drafts are the draft model's most likely tokens and every
accepted token is the target's own. Which drafts are verified may depend on the prefix, the batch
and the clock, never on the target's samples. With *sampled* drafts
(``--speculative-use-rejection-sampling``, refused for now) a rule that reads the drawn token could
bias the output. Each policy's docstring names its kind. "Safe to drop": any token may go.
"Keep-then-stop": the failing token must still be verified and only the tokens after it may go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sglang_c2t.draft_layer import DraftLayer

__all__ = ["DraftLayer"]  # part of the interface of policies


class ChainPolicy(Protocol):
    """Decides where each request's draft ends."""

    name: ClassVar[str]
    """The name for ``--c2t-policy``."""

    @property
    def needs(self) -> frozenset[str]:
        """Names from :attr:`DraftLayer.measured` that the policy reads.

        Names that :func:`~sglang_c2t.draft_layer.measure` does not know come from the policy's
        method ``measure(logits, hidden)``. It maps the draft's logits [R, V] and hidden states [R,
        H] (or ``None``) to tensors [R, ...] by name. ``--c2t-record`` also writes these columns.
        """
        ...

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: whether the target should verify this token. Pure tensor code without host
        reads, so that a CUDA graph can capture it.
        """
        ...


@runtime_checkable
class Gate(ChainPolicy, Protocol):
    """A chain policy that also ranks: it gives each token a confidence, and has a threshold.
    Algorithm 1 needs this to prune trees. A class attribute ``tree_beta`` may set the default
    threshold for trees, where siblings share the probability that a chain's token has alone.
    """

    @property
    def beta(self) -> float:
        """Threshold of the confidence."""
        ...

    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B] float32, the larger the better."""
        ...

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: whether the confidence reaches beta."""
        return self.confidence(layer) >= self.beta


# -- trees --------------------------------------------------------------------------------
# B requests, W beam rows forwarded per step, K children offered per row. W is 1 in the first
# layer (the root) and K after it.


class TreeShape(NamedTuple):
    """Limits of the trees, as SGLang names them; fixed while a server runs."""

    topk: int
    """K: rows forwarded per draft step, and children offered per row."""

    num_steps: int
    """D: layers, so that D - 1 draft forwards follow the first layer."""

    num_draft_tokens: int
    """N: nodes the target may verify per request, root included."""

    @property
    def num_candidates(self) -> int:
        """M: nodes the draft can propose per request."""
        return self.topk + (self.num_steps - 1) * self.topk**2


@dataclass(frozen=True)
class TreeLayer:
    """All children offered in one step, dead ones included."""

    nodes: DraftLayer
    """[B * W * K] tokens for gates, without ``parent``."""

    batch: int
    topk: int

    def grid(self, values: Tensor) -> Tensor:
        """[B, W, K]: one value [B * W * K] per node; children in order of probability."""
        return values.view(self.batch, -1, self.topk)

    @property
    def depth(self) -> int:
        """1 for children of the root."""
        assert isinstance(self.nodes.depth, int)
        return self.nodes.depth

    @property
    def joint(self) -> Tensor:
        """[B, W, K] float32."""
        return self.grid(self.nodes.joint)

    @property
    def entropy(self) -> Tensor:
        """[B, W, K] float32, nats: entropy of the distribution a node was chosen from."""
        return self.grid(self.nodes.entropy)


class Growth(NamedTuple):
    """A policy's decision about one layer; each [B, W, K]. Dead nodes are handled by the caller."""

    key: Tensor
    """float32, not nan: -inf keeps a node out of its tree. Otherwise its rank under a cap; a node
    never outranks its ancestors."""

    expand: Tensor
    """float32: the K best of each request are forwarded next; -inf is never forwarded."""

    verify: Tensor | None = None
    """bool: a filter on the nodes of the tree, after the cap; descendants of a refused node go with
    it. ``None``: all are verified."""


class TreePolicy(Protocol):
    """Decides how each request's tree grows."""

    @property
    def name(self) -> str:
        """The name for ``--c2t-policy``."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """The same as in :class:`ChainPolicy`."""
        ...

    def check(self, shape: TreeShape) -> None:
        """Raise :class:`~sglang_c2t.config.ConfigError` if trees are too small for the rule."""
        ...

    def grow(self, layer: TreeLayer) -> Growth:
        """Judge one layer. Pure tensor code without host reads."""
        ...


def is_tree_policy(policy: Any) -> bool:
    """Whether the policy grows trees; otherwise it cuts chains."""
    return hasattr(policy, "grow")


def own_measure(policy: Any) -> Callable[[Tensor, Tensor | None], dict[str, Tensor]] | None:
    """Return the ``measure`` of the policy or of its gate; ``None`` without one."""
    return getattr(getattr(policy, "gate", policy), "measure", None)


# -- calls ----------------------------------------------------------------------------------
# A policy may be a user's own: its answer is checked before shapes depend on it.


def kept(policy: ChainPolicy, layer: DraftLayer) -> Tensor:
    """[B] bool: living chains that the policy keeps. Raises TypeError for an answer of the wrong
    shape or dtype, and whatever the policy raises.
    """
    keep = policy.keep(layer)
    _require_tensor("keep", keep, layer.alive.shape, keep.dtype == torch.bool, "bool")
    return keep & layer.alive


def grown(policy: TreePolicy, layer: TreeLayer) -> Growth:
    """Return the policy's decision about a layer; raises as :func:`kept`."""
    growth, shape = policy.grow(layer), layer.joint.shape
    for name, values in (("key", growth.key), ("expand", growth.expand)):
        _require_tensor(name, values, shape, values.is_floating_point(), "float32")
    if growth.verify is not None:
        _require_tensor("verify", growth.verify, shape, growth.verify.dtype == torch.bool, "bool")
    return growth


def _require_tensor(
    name: str, value: Tensor, shape: torch.Size, right_dtype: bool, dtype: str
) -> None:
    if value.shape != shape or not right_dtype:
        raise TypeError(
            f"{name} must be {dtype} {list(shape)}, got {value.dtype} {list(value.shape)}"
        )

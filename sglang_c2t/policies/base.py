"""What a policy is: a rule that says, layer by layer, which drafts stay.

A policy is asked once per drafted layer, for the whole batch. In chains the caller keeps
the running conjunction, so a chain that has ended stays ended (Algorithm 1 of C2T,
arXiv:2502.13652, restricted to one child per node). In trees the caller drops whatever
hangs from a dropped node.

Every rule here is lossless because drafts are the draft model's most likely tokens, and
every accepted token is the target's own: what is verified may depend on the prefix, on the
rest of the batch and on the clock, never on what the target will sample. Were drafts *sampled*
(``--speculative-use-rejection-sampling``, refused for now), a rule that reads the drawn
token itself could bias the output. Each policy's docstring says which kind it is: "safe
to drop" or "keep-then-stop", i.e. the failing token must still be verified and only the
tokens behind it may go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sglang_c2t.draft_layer import DraftLayer

__all__ = ["DraftLayer"]  # what policies read, beside what they are


class ChainPolicy(Protocol):
    """Decides where each request's draft ends."""

    name: ClassVar[str]
    """As written after ``--c2t-policy``."""

    @property
    def needs(self) -> frozenset[str]:
        """Names from :attr:`DraftLayer.measured` that the policy reads.

        A name that :func:`~sglang_c2t.draft_layer.measure` does not know comes from the policy's
        own ``measure(logits, hidden)``: from the draft's logits [R, V] and hidden states [R, H] (or
        ``None``) to tensors [R, ...] by name. ``--c2t-record`` writes these columns too.
        """
        ...

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: the target should verify this token.

        Pure tensor code without host reads, so that it can be captured in a CUDA graph.
        """
        ...


@runtime_checkable
class Gate(ChainPolicy, Protocol):
    """A chain policy that also ranks: token by token, a confidence and its threshold.

    What Algorithm 1 needs to prune trees. A class attribute ``tree_beta`` may be the default
    threshold there: siblings share the probability that a chain's token has alone.
    """

    @property
    def beta(self) -> float:
        """Threshold of the confidence."""
        ...

    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B] float32, the larger the better."""
        ...

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: the confidence reaches beta."""
        return self.confidence(layer) >= self.beta


# -- trees --------------------------------------------------------------------------------
# B requests, W beam rows forwarded per step, K children offered per row; W is 1 in the
# first layer (the root) and K behind it.


class TreeShape(NamedTuple):
    """How large trees can become, in SGLang's words; fixed while a server runs."""

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
    """[B * W * K] tokens as gates read them, without ``parent``."""

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
        """[B, W, K] float32, nats: of the distribution a node was chosen from."""
        return self.grid(self.nodes.entropy)


class Growth(NamedTuple):
    """A policy's decision about one layer; each [B, W, K]. Dead nodes are handled by the caller."""

    key: Tensor
    """float32, not nan: -inf keeps a node out of its tree. Otherwise its rank where a cap
    bites; a node never outranks its ancestors, whatever its own key says."""

    expand: Tensor
    """float32: the K best of each request are forwarded next; -inf is never forwarded."""

    verify: Tensor | None = None
    """bool: a second look at the nodes that made it into the tree, after the cap. What
    hangs from a refused node goes with it. ``None``: all are verified."""


class TreePolicy(Protocol):
    """Decides how each request's tree grows."""

    @property
    def name(self) -> str:
        """As written after ``--c2t-policy``."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """As of :class:`ChainPolicy`."""
        ...

    def check(self, shape: TreeShape) -> None:
        """Raise :class:`~sglang_c2t.config.ConfigError` where trees are too small for the rule."""
        ...

    def grow(self, layer: TreeLayer) -> Growth:
        """Judge one layer. Pure tensor code without host reads."""
        ...


def is_tree_policy(policy: Any) -> bool:
    """Whether the policy grows trees (and does not cut chains)."""
    return hasattr(policy, "grow")


def own_measure(policy: Any) -> Callable[[Tensor, Tensor | None], dict[str, Tensor]] | None:
    """The policy's ``measure``, or that of the gate it prunes by; ``None`` where it has none."""
    return getattr(getattr(policy, "gate", policy), "measure", None)


# -- asking ---------------------------------------------------------------------------------
# A policy may be anybody's: what it returns is looked at before shapes depend on it.


def kept(policy: ChainPolicy, layer: DraftLayer) -> Tensor:
    """[B] bool: what the policy keeps of the chains that are alive.

    TypeError for an answer that is no such tensor; besides, whatever the policy raises.
    """
    keep = policy.keep(layer)
    _require_tensor("keep", keep, layer.alive.shape, keep.dtype == torch.bool, "bool")
    return keep & layer.alive


def grown(policy: TreePolicy, layer: TreeLayer) -> Growth:
    """The policy's decision about a layer; TypeError where it is none, as for :func:`kept`."""
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

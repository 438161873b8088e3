"""Growth of a batch of draft trees: the policy decides layer by layer, this file keeps the state.

In each step the draft offers K children for each of a request's W beam rows. W is 1 in the first
layer (the root) and K after it. The *candidates* are numbered layer by layer and row by row. This
is SGLang's flat index, so candidate c is a child of row c // K - 1. The policy decides which enter
the tree and which may be forwarded; the K best of those become the next layer's beam rows::

    layer 1   root -> a b          beams: a b          candidates 0 1
    layer 2   a -> c d, b -> e f   beams: c e          candidates 2 3 4 5
    layer 3   c -> g h, e -> i j                       candidates 6 7 8 9

A draft model's KV stays in the row that wrote it while the beams are re-sorted, so the ancestors
of a row are in other rows. ``Beams.ancestor_rows`` has their numbers. Above, after layer 2, c is in
row 0 under a in row 0, and e in row 1 under b in row 1: [[0, 0], [1, 1]]. With d instead of e they
are [[0, 0], [0, 1]].

Static shapes, no host reads. It runs any policy in torch. On a GPU a kernel runs the rules that it
knows, without calling the policy (:meth:`TreeGrowth.add_judged`).

Legend: B requests, W beam rows, K topk, D steps, M candidates, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sglang_c2t.draft_layer import PLACES, DraftLayer, margins
from sglang_c2t.kernels.beams import Beams, Candidates, Rule, choose_beams, grow_layer
from sglang_c2t.kernels.trees import finish_trees
from sglang_c2t.policies.base import Growth, TreeLayer, TreePolicy, TreeShape, grown
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.tree import Trees

#: Measurements that differ between the children of a row; the others belong to the row.
PER_NODE = frozenset({"margin", "confidence", "keep"}) | PLACES


class TreeGrowth:
    """The trees of one step.

    Args:
        policy: Decides which nodes enter and which are forwarded.
        shape: Limits of the trees.
        batch: B.
        device: Device of the draft probabilities.
        failed: Called with the policy's exception; the tree is then EAGLE-2's. ``None``: re-raise.
        whole: [B] bool: requests that always get EAGLE-2's tree; ``None``: none.
        fused: The policy's rule for a kernel, and the threshold that it reads; ``None``: torch
            calls the policy.
    """

    def __init__(
        self,
        policy: TreePolicy,
        shape: TreeShape,
        batch: int,
        device: torch.device | str,
        failed: Callable[[Exception], None] | None = None,
        whole: Tensor | None = None,
        fused: tuple[Rule, Tensor] | None = None,
    ) -> None:
        self._policy = policy
        self._failed = failed
        self._whole = whole
        self._shape = shape
        self.batch = batch
        self.device = device
        self._layers: list[TreeLayer] = []
        self._tokens: list[Tensor] = []  # each [B, W * K], as the next three
        self._parents: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._verify: list[Tensor | None] = []
        self._beams: Beams | None = None
        self._fused = fused
        self._depth, self._offered = 0, 0
        """Layers and candidates per request so far."""
        if fused is not None:
            most = shape.topk + (shape.num_steps - 1) * shape.topk**2
            self._candidates = Candidates.empty(batch, most, device)

    @property
    def fused(self) -> bool:
        """Whether a kernel grows these trees."""
        return self._fused is not None

    @property
    def depth(self) -> int:
        """Layers so far."""
        return self._depth

    @property
    def layers(self) -> list[TreeLayer]:
        """The layers so far, shallowest first."""
        return self._layers

    @property
    def beams(self) -> Beams:
        """The rows of the next forward, at first the root."""
        if self._beams is None:
            self._beams = self._root()
        return self._beams

    def add(
        self,
        tokens: Tensor,
        prob: Tensor,
        measured: Mapping[str, Tensor],
        exists: Tensor | None = None,
    ) -> Beams:
        """Judge one layer of children and choose the next beams.

        Args:
            tokens: [B, W, K] int64, by falling probability.
            prob: [B, W, K] float32, q(child | path).
            measured: By name, [B * W, ...] per row or [B * W * K] per child (:data:`PER_NODE`).
                Holds ``entropy`` and what the policy needs; places are added here.
            exists: [B, W, K] bool: the other children are dead; ``None``: all exist.
        """
        assert self._fused is None, "a kernel grows this tree"
        layer = self._layer(prob, measured, exists)
        growth = self._grown(layer)
        key = _live(growth.key, layer)
        self._layers.append(layer)
        self._tokens.append(tokens.flatten(1))
        self._parents.append(self.beams.candidate.repeat_interleave(self._shape.topk, dim=1))
        self._keys.append(key)
        self._verify.append(None if growth.verify is None else growth.verify.flatten(1))
        self._depth += 1
        if self._depth < self._shape.num_steps:
            enters = key > -torch.inf  # not where it is nan either
            expand = torch.where(enters, growth.expand.float().flatten(1), -torch.inf)
            self._beams = choose_beams(
                expand, tokens.flatten(1), layer.joint.flatten(1), self.beams.ancestor_rows,
                width=self._shape.topk, topk=self._shape.topk, first=self._offered,
            )  # fmt: skip
        self._offered += key.shape[1]
        return self.beams

    def add_judged(self, tokens: Tensor, prob: Tensor, confidence: Tensor) -> Beams:
        """Do the same as :meth:`add` in one launch, from ``confidence`` [B, W * K]."""
        assert self._fused is not None, "no kernel grows this tree"
        rule, beta = self._fused
        self._depth += 1
        self._beams = grow_layer(
            tokens.flatten(1), prob.flatten(1), confidence, self._beams, self._candidates,
            rule=rule, beta=beta, whole=self._whole, width=self._shape.topk, topk=self._shape.topk,
            first=self._offered, expands=self._depth < self._shape.num_steps,
        )  # fmt: skip
        self._offered += tokens.shape[1] * self._shape.topk
        return self._beams

    def finish(self) -> tuple[Trees, Tensor]:
        """Return the trees without roots, and [B, N] float32 keys that rank their nodes. The root's
        key is inf, that of padding -inf. A tree holds at most N nodes.
        """
        sizes = {"max_nodes": self._shape.num_draft_tokens, "max_depth": self._depth}
        if self._fused is not None:
            tokens, parents, keys, passed = (
                table[:, : self._offered].contiguous() for table in self._candidates
            )
            filtered = self._fused[0].kind == "filtered"
            return finish_trees(tokens, parents, keys, passed if filtered else None, **sizes)
        verify: Tensor | None = None
        if any(of_layer is not None for of_layer in self._verify):
            every = zip(self._keys, self._verify, strict=True)
            verify = torch.cat(
                [torch.ones_like(k, dtype=torch.bool) if v is None else v for k, v in every], dim=1
            )
        return finish_trees(
            torch.cat(self._tokens, dim=1),
            torch.cat(self._parents, dim=1),
            torch.cat(self._keys, dim=1),
            verify,
            **sizes,
        )

    def _grown(self, layer: TreeLayer) -> Growth:
        """Return the policy's decision; if it fails, EAGLE-2's for this layer and all others."""
        try:
            growth = grown(self._policy, layer)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
            self._policy = EAGLE2()
            self._keys = [_live(self._policy.grow(layer).key, layer) for layer in self._layers]
            self._verify = [None] * len(self._layers)
            return self._policy.grow(layer)
        return growth if self._whole is None else _mixed(self._whole, growth, EAGLE2().grow(layer))

    # -- the tables ------------------------------------------------------------------------

    def _root(self) -> Beams:
        zero = torch.zeros((self.batch, 1), dtype=torch.int64, device=self.device)
        one, nowhere = torch.ones_like(zero), zero[:, :, None][:, :, :0]
        return Beams(zero, zero, zero, zero - 1, one.bool(), one.float(), nowhere)

    def _layer(
        self, prob: Tensor, measured: Mapping[str, Tensor], exists: Tensor | None
    ) -> TreeLayer:
        """Build the layer for policies: one row per node."""
        topk = self._shape.topk
        alive = self.beams.alive.flatten().repeat_interleave(topk)
        if exists is not None:
            alive = alive & exists.flatten()
        joint = prob.float() * self.beams.joint[:, :, None]
        per_node = {
            name: values if name in PER_NODE else values.repeat_interleave(topk, dim=0)
            for name, values in measured.items()
        }
        if "confidence" not in measured:
            per_node |= {name: self._place(name, prob) for name in PLACES & self._policy.needs}
        nodes = DraftLayer(
            depth=self._depth + 1,
            prob=prob.flatten().float(),
            joint=joint.flatten(),
            entropy=per_node["entropy"],
            alive=alive,
            measured=per_node,
        )
        return TreeLayer(nodes, self.batch, topk)

    def _place(self, name: str, prob: Tensor) -> Tensor:
        """[B * W * K] float32: places of children with ``prob`` [B, W, K], or of their parents."""
        rows, children = (torch.arange(n, device=prob.device) for n in prob.shape[1:])
        place = children if name == "rank" else rows[:, None]
        return place.float().expand(prob.shape).flatten()


def _mixed(whole: Tensor, growth: Growth, full: Growth) -> Growth:
    """Return ``full`` for the requests in ``whole`` [B] bool, and ``growth`` for the others."""
    of_node = whole[:, None, None]
    return Growth(
        key=torch.where(of_node, full.key, growth.key),
        expand=torch.where(of_node, full.expand, growth.expand),
        verify=None if growth.verify is None else growth.verify | of_node,
    )


def _live(key: Tensor, layer: TreeLayer) -> Tensor:
    """[B, W * K] float32: the layer's keys; -inf for dead nodes."""
    return key.float().masked_fill(~layer.grid(layer.nodes.alive), -torch.inf).flatten(1)


def node_margins(prob: Tensor) -> Tensor:
    """[R * K] float32: :func:`~sglang_c2t.draft_layer.margins` of all children of R rows. ``prob``
    [R, K], K >= 2, holds their probabilities, descending.
    """
    log = prob.float().clamp(min=torch.finfo(torch.float32).tiny).log()
    return margins(log, log.shape[1]).flatten()

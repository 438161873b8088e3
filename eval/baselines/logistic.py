"""Logistic: two parameters per depth on the draft's top-2 margin.

a_i = sigmoid(w_d m_i + b_d) estimates "accepted, if the tokens before it are", with m_i
the log ratio of the two most likely draft tokens; keep = prod_{j <= i} a_j >= beta. The
estimator of vLLM's adaptive verification (vllm-project/vllm PR 52228), as a threshold
rule; the PR's text names logit(max q) instead of m_i. vLLM refits it online and feeds a cost
model instead of a threshold, so no default threshold is published; 0.3 is ours.

Served for chains; ``eval.tables`` replays it on trees too.

Sampled drafts: safe to drop, because m_i and the acceptances before i are functions of
the distributions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from eval.baselines.estimators import frozen, load, training_rows
from sglang_c2t.classifier.recording import Recording, require_finite
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import DraftLayer


class DepthLogistic(nn.Module):
    """w_d x + b_d with its own two numbers for each depth; deeper tokens use the deepest."""

    def __init__(self, max_depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max_depth))
        self.bias = nn.Parameter(torch.zeros(max_depth))

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        """Logit of "accepted, given that the token before it is"; all of one shape."""
        index = depth.long().clamp(1, self.weight.numel()) - 1
        return self.weight[index] * x + self.bias[index]


@dataclass(frozen=True, eq=False)
class Logistic:
    """Threshold on the running product of per-depth acceptance estimates."""

    weights: DepthLogistic | str
    beta: float = 0.3
    name: ClassVar[str] = "logistic"
    tree_beta: ClassVar[float] = 0.03  # ours: about a dozen nodes on the demo models
    needs: ClassVar[frozenset[str]] = frozenset({"margin"})

    def __post_init__(self) -> None:
        """Load the weights where a file is given."""
        if not isinstance(self.weights, DepthLogistic):
            found = load(self.weights)
            if found.keys() != {"weight", "bias"}:
                raise ConfigError(f"policy logistic: {self.weights} holds no logistic per depth")
            net = frozen(DepthLogistic(found["weight"].numel()), found)
            object.__setattr__(self, "weights", net)

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: the product of the estimates down to this layer reaches beta."""
        return self._product(layer) >= self.beta

    def _product(self, layer: DraftLayer) -> Tensor:
        net = self.weights
        assert isinstance(net, DepthLogistic)
        depth = torch.full_like(layer.prob, float(layer.depth))
        accepts = net.to(layer.prob.device)(layer.measured["margin"], depth).sigmoid()
        return accepts if layer.parent is None else accepts * self._product(layer.parent)


def train(recording: Recording) -> DepthLogistic:
    """To the optimum: the loss is convex, and so few parameters want no stochastic steps."""
    rows = training_rows(recording, torch.Generator().manual_seed(0))
    margin, depth = recording.nodes["margin"][rows], recording.nodes["depth"][rows].float()
    require_finite(margin[:, None])
    labels = recording.nodes["accept"][rows].float()
    net = DepthLogistic(int(recording.nodes["depth"].max()))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")
    loss_of = nn.BCEWithLogitsLoss()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_of(net(margin, depth), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return net.requires_grad_(False)


def path_scores(net: DepthLogistic, recording: Recording) -> Tensor:
    """[n] float32: the product of the estimates along each recorded token's path."""
    depth = recording.nodes["depth"]
    scores = net(recording.nodes["margin"], depth.float()).sigmoid()
    parents = recording.parent_rows()
    for layer in range(2, int(depth.max()) + 1):
        rows = (depth == layer).nonzero().flatten()
        scores[rows] = scores[rows] * scores[parents[rows]]
    return scores

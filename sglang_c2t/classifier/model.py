"""The network: from a token's features to the logit of "the target will accept it".

C2T's network has two layers, 3-48-1, 241 parameters (arXiv:2502.13652, section "Classifier" and
appendix C.3). Pure torch.

Legend: F features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

HIDDEN_SIZE = 48


class ConfidenceNet(nn.Module):
    """Maps [..., F] float32 features to [...] float32 logits, with ReLU between the layers."""

    def __init__(self, num_features: int = 3, hidden_sizes: Sequence[int] = (HIDDEN_SIZE,)) -> None:
        super().__init__()
        self.num_features = num_features
        self.hidden_sizes = list(hidden_sizes)
        sizes = [num_features, *hidden_sizes]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.out = nn.Linear(sizes[-1], 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logit of "the target will accept this token"."""
        x = features
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x).squeeze(-1)

    @torch.no_grad()
    def absorb_scaling(self, mean: Tensor, std: Tensor) -> None:
        """Make the network read raw features x after training on (x - mean) / std."""
        first = self.hidden[0]
        assert isinstance(first, nn.Linear)
        first.weight.div_(std)
        first.bias.sub_(first.weight @ mean)


def num_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters; 241 for the paper's sizes."""
    return sum(p.numel() for p in model.parameters())

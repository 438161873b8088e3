"""The classifier: a two-layer ReLU network on three numbers, 3-48-1, 241 parameters.

C = sigmoid(w2 . relu(W1 x + b1) + b2) with x = (P, H, d) as measured, no scaling
(arXiv:2502.13652, section "Classifier" and appendix). Pure torch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN_SIZE = 48


class ConfidenceNet(nn.Module):
    """[..., 3] float32 features to [...] float32 logits."""

    def __init__(self, num_features: int = 3, hidden_size: int = HIDDEN_SIZE) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_features, hidden_size)
        self.out = nn.Linear(hidden_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Logit of "the target will accept this token"."""
        return self.out(torch.relu(self.hidden(features))).squeeze(-1)


def num_parameters(model: nn.Module) -> int:
    """Trainable numbers in the model; 241 for the paper's sizes."""
    return sum(p.numel() for p in model.parameters())

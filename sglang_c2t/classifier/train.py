"""Train a classifier on recorded drafts, as the paper does.

Binary cross-entropy, Adam 1e-3, batch 1024, 10 epochs, 0.95 / 0.05 split by request,
rejected rows sampled down to as many as accepted ones when they outnumber them
(arXiv:2502.13652, appendix "Training"). Deterministic for a given seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.features import SERVED, feature_matrix
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.config import ConfigError


@dataclass(frozen=True)
class TrainSettings:
    """Hyper-parameters; the defaults are the paper's."""

    epochs: int = 10
    batch_size: int = 1024
    learning_rate: float = 1e-3
    heldout_share: float = 0.05
    seed: int = 0


def train_classifier(
    rows: dict[str, Tensor],
    *,
    origins: list[dict[str, Any]],
    settings: TrainSettings | None = None,
    show_progress: bool = False,
) -> Classifier:
    """Fit the 3-48-1 network to recorded rows (columns of ``recording.COLUMNS``)."""
    settings = settings or TrainSettings()
    generator = torch.Generator().manual_seed(settings.seed)
    train, heldout = split_by_request(rows["request"], settings.heldout_share, generator)
    features = feature_matrix(rows["joint"], rows["entropy"], rows["depth"])  # [n, 3]
    labels = rows["accept"].float()  # [n]
    train = _balance(train, labels, generator)

    torch.manual_seed(settings.seed)  # the network's initial weights
    net = ConfidenceNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.learning_rate)
    loss_fn = nn.BCEWithLogitsLoss()
    epochs = range(settings.epochs)
    for _ in track(epochs, description="training") if show_progress else epochs:
        order = train[torch.randperm(train.numel(), generator=generator)]
        for batch in order.split(settings.batch_size):
            loss = loss_fn(net(features[batch]), labels[batch])
            if not torch.isfinite(loss):
                raise ConfigError("training diverged: the loss is not finite")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval().requires_grad_(False)
    scores = torch.sigmoid(net(features[heldout]))
    training = {
        "origins": origins,
        "rows": int(labels.numel()),
        "train_rows_after_balancing": int(train.numel()),
        "heldout_rows": int(heldout.numel()),
        "heldout_auc": round(auc(scores, labels[heldout]), 4),
        "heldout_auc_joint_alone": round(auc(rows["joint"][heldout], labels[heldout]), 4),
        "settings": vars(settings),
    }
    return Classifier(net=net, features=SERVED, training=training)


def split_by_request(
    request: Tensor, heldout_share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Row indices of training and held-out requests; no request is in both."""
    requests = request.unique()
    if requests.numel() < 2:
        raise ConfigError(
            f"a recording needs at least 2 requests to hold some out, got {requests.numel()}"
        )
    order = requests[torch.randperm(requests.numel(), generator=generator)]
    num_heldout = max(1, round(heldout_share * requests.numel()))
    is_heldout = torch.isin(request, order[:num_heldout])
    return (~is_heldout).nonzero().flatten(), is_heldout.nonzero().flatten()


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve; ties count half. nan when one class is missing."""
    positives = labels > 0.5
    num_pos, num_neg = int(positives.sum()), int((~positives).sum())
    if not num_pos or not num_neg:
        return float("nan")
    _, inverse, counts = scores.double().unique(return_inverse=True, return_counts=True)
    # Mean 1-based rank of each tied group of scores (Mann-Whitney).
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = mean_rank[inverse][positives].sum().item()
    return (rank_sum - num_pos * (num_pos + 1) / 2) / (num_pos * num_neg)


def _balance(rows: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Negative sampling: drop random rejected rows until they are no majority."""
    accept = labels[rows] > 0.5
    positives, negatives = rows[accept], rows[~accept]
    if not positives.numel() or not negatives.numel():
        raise ConfigError(
            f"a recording needs accepted and rejected tokens, got {positives.numel()} accepted "
            f"and {negatives.numel()} rejected; record more prompts"
        )
    keep = torch.randperm(negatives.numel(), generator=generator)[: positives.numel()]
    return torch.cat((positives, negatives[keep]))

"""Train a classifier on recorded drafts, as the paper does.

Binary cross-entropy, Adam 1e-3, batch 1024, 0.95 / 0.05 split by prompt. Rejected tokens are
sampled down to the number of accepted ones if they outnumber them (arXiv:2502.13652, appendix C.2).
Fine-tuning: 1e-4, from given weights. Deterministic for a given seed.

The number of steps is fixed, where the paper fixes 10 epochs: 10 epochs of a small recording
underfit. On the real pair they gave an AUC of 0.897, and 10,000 steps gave 0.921.

The table :data:`RECIPES` lists the kinds of classifiers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.features import FeatureSpec, feature_matrix
from sglang_c2t.classifier.model import HIDDEN_SIZE, ConfidenceNet, num_parameters
from sglang_c2t.classifier.recording import Recording, require_finite
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.offline.scores import auc, expected_calibration_error


@dataclass(frozen=True)
class Recipe:
    """A kind of classifier: its inputs, its network, its label, and the data of its loss."""

    names: tuple[str, ...]
    """Features, see ``features``."""

    hidden_size: int = HIDDEN_SIZE

    standardise: bool = False
    """Train on inputs of mean 0 and spread 1; folded into the weights afterwards."""

    balance: bool = True
    """Sample rejected tokens down to as many as accepted ones."""


RECIPES: dict[str, Recipe] = {
    # The paper's: raw joint probability, entropy, depth.
    "c2t": Recipe(("joint", "entropy", "depth")),
    # The same network on the logarithm, which separates deep tokens, and on all rejected tokens,
    # so that its confidence is a probability.
    "c2t-log": Recipe(("log_joint", "entropy", "depth"), standardise=True, balance=False),
    # With the token's margin. Chosen among own probability, margin and both on held-out training
    # prompts.
    "c2t-plus": Recipe(
        ("log_joint", "margin", "entropy", "depth"), standardise=True, balance=False
    ),
    # In trees, also its rank there.
    "c2t-plus-tree": Recipe(
        ("log_joint", "margin", "entropy", "depth", "rank", "parent_rank"),
        standardise=True,
        balance=False,
    ),
    # The paper's entropy, cut to the 1000 largest probabilities.
    "c2t-top1000": Recipe(("joint", "entropy_top1000", "depth")),
}


@dataclass(frozen=True)
class TrainSettings:
    """Hyper-parameters; the defaults are the paper's, except the number of steps."""

    steps: int = 10_000
    batch_size: int = 1024
    learning_rate: float = 1e-3
    heldout_share: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")


FINE_TUNE = TrainSettings(steps=1_000, learning_rate=1e-4)


def recipe_named(name: str) -> Recipe:
    """Return the recipe of that name; :class:`ConfigError` if there is none."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


def train_classifier(
    recording: Recording,
    recipe: Recipe = RECIPES["c2t"],
    *,
    settings: TrainSettings | None = None,
    start: Classifier | None = None,
    show_progress: bool = False,
) -> Classifier:
    """Fit a classifier to recorded drafts.

    Args:
        recording: Training data; a twentieth of its prompts is held out for scores.
        recipe: Kind of classifier.
        settings: Hyper-parameters; the defaults, or :data:`FINE_TUNE` if ``start`` is given.
        start: Fine-tune these weights instead of random ones.
        show_progress: Show a progress bar.

    Raises:
        ConfigError: Too little data, one class only, values that are not finite, or a
            loss that diverges.
    """
    settings = settings or (FINE_TUNE if start else TrainSettings())
    generator = torch.Generator().manual_seed(settings.seed)
    spec = FeatureSpec(names=recipe.names)
    features, labels = _examples(recording, spec)
    node_prompt = recording.drafts["prompt"][recording.nodes["draft"].long()]
    train, heldout = split_by_group(node_prompt, settings.heldout_share, generator)
    train = _both_classes(train, labels, generator, balance=recipe.balance)

    torch.manual_seed(settings.seed)  # the network's initial weights
    net = _network(recipe, features, start)
    mean, std = _scaling(features[train], recipe.standardise and start is None)
    x = (features[train] - mean) / std
    fit(net, x, labels[train], settings, generator, show_progress)
    net.absorb_scaling(mean, std)
    net.eval().requires_grad_(False)

    scores = torch.sigmoid(net(features[heldout]))
    joint = recording.nodes["joint"][heldout]
    training = {
        "origins": recording.origins,
        "roots": recording.roots,
        "drafts": recording.num_drafts,
        "tokens": recording.num_nodes,
        "trained_on": int(train.numel()),
        "parameters": num_parameters(net),
        **_heldout_scores(scores, joint, labels[heldout]),
        "fine_tuned": start is not None,
        "recipe": asdict(recipe),
        "settings": asdict(settings),
    }
    return Classifier(net, spec, training)


def _heldout_scores(scores: Tensor, joint: Tensor, labels: Tensor) -> dict[str, Any]:
    """Score the ranking of held-out ``labels`` [n] by ``scores`` and ``joint`` [n], and the
    calibration of ``scores``.
    """
    return {
        "heldout_tokens": int(labels.numel()),
        "heldout_auc": _rounded(auc(scores, labels)),
        "heldout_auc_joint_alone": _rounded(auc(joint, labels)),
        "heldout_ece": _rounded(expected_calibration_error(scores, labels)),
    }


def _rounded(score: float) -> float | None:
    """Round a score; ``None`` if a single class leaves it undefined, because JSON has no nan."""
    return None if math.isnan(score) else round(score, 4)


def split_by_group(
    group: Tensor, heldout_share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Row indices of training and held-out groups; no group is in both."""
    groups = group.unique()
    if groups.numel() < 2:
        raise ConfigError(
            f"a recording needs at least 2 prompts to hold some out, got {groups.numel()}; "
            "record more prompts"
        )
    order = groups[torch.randperm(groups.numel(), generator=generator)]
    num_heldout = max(1, round(heldout_share * groups.numel()))
    is_heldout = torch.isin(group, order[:num_heldout])
    return (~is_heldout).nonzero().flatten(), is_heldout.nonzero().flatten()


def _examples(recording: Recording, spec: FeatureSpec) -> tuple[Tensor, Tensor]:
    """Return features [n, F] and labels [n] float32."""
    features = feature_matrix(spec.names, recording.layer(spec.needs))
    require_finite(features)
    return features, recording.nodes["accept"].float()


def _network(recipe: Recipe, features: Tensor, start: Classifier | None) -> ConfidenceNet:
    if start is not None:
        if start.features.names != recipe.names:
            raise ConfigError(
                f"fine-tuning needs the same features: the classifier reads "
                f"{', '.join(start.features.names)}, the recipe {', '.join(recipe.names)}"
            )
        return copy.deepcopy(start.net).requires_grad_(True)
    return ConfidenceNet(features.shape[1], [recipe.hidden_size])


def fit(
    net: nn.Module,
    features: Tensor,
    labels: Tensor,
    settings: TrainSettings,
    generator: torch.Generator,
    show_progress: bool = False,
) -> None:
    """Minimise the binary cross-entropy of the labels [n], 0 or 1, with Adam."""
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.learning_rate, fused=True)
    loss_fn = nn.BCEWithLogitsLoss()
    batches = _batches(features, labels, settings.batch_size, generator)
    with progress_on(Console(quiet=not show_progress)) as progress:
        steps = progress.track(range(settings.steps), description="training: steps")
        for _, (x, y) in zip(steps, batches, strict=False):
            loss = loss_fn(net(x), y)
            if not bool(torch.isfinite(loss)):
                raise ConfigError(f"training diverged: the loss is {loss.item()}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _batches(
    features: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, in a new order each epoch."""
    while True:
        order = torch.randperm(len(labels), generator=generator)
        # One gather per epoch: batches are then views, and a step is mostly overhead.
        x, y = features[order].split(batch_size), labels[order].split(batch_size)
        yield from zip(x, y, strict=True)


def _scaling(features: Tensor, standardise: bool) -> tuple[Tensor, Tensor]:
    if not standardise:
        return torch.zeros(features.shape[1]), torch.ones(features.shape[1])
    return features.mean(dim=0), features.std(dim=0).clamp(min=1e-6)


def _both_classes(
    rows: Tensor, labels: Tensor, generator: torch.Generator, *, balance: bool
) -> Tensor:
    """Sample down: drop random rejected rows until they are no majority."""
    accept = labels[rows] > 0.5
    positives, negatives = rows[accept], rows[~accept]
    if not positives.numel() or not negatives.numel():
        raise ConfigError(
            f"a recording needs accepted and rejected tokens, got {positives.numel()} accepted "
            f"and {negatives.numel()} rejected; record more prompts"
        )
    if not balance:
        return rows
    keep = torch.randperm(negatives.numel(), generator=generator)[: positives.numel()]
    return torch.cat((positives, negatives[keep]))

"""MCSD's decision models: stop drafting when no sequence is likely to be accepted.

a_i = MLP(top-k draft probabilities, entropy), two layers (type 2 of Lu et al., "Improving
Multi-candidate Speculative Decoding", arXiv:2409.10644, section 3.3), or a_i = MLP(draft
hidden state), three layers (type 1). Drafting stops when a_i < threshold for *all*
sequences, 0.4 in the paper; ``per_request`` stops each sequence by itself.

The paper leaves open: k (here 10), the layer sizes (48; 64 and 32), and, for type 1, the
label max(1, p/q), which is never below 1; read as min(1, p/q), and under a greedy target
that is "accepted or not". Both models are trained on tokens that verification reached.
The paper keeps the token it stopped at; here it goes, like every policy's failing token.

Sampled drafts: safe to drop, because both inputs are functions of the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from eval.baselines.estimators import frozen, load, training_rows
from sglang_c2t.checks import require
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.classifier.recording import Recording, require_finite
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import DraftLayer, floored
from sglang_c2t.offline.train import TrainSettings, fit
from sglang_c2t.policies.fixed import Fixed

#: Largest probabilities that the model of type 2 reads: the top-K of EAGLE-2 and C2T.
TOPK_PROBS = 10


def topk_prob(logits: Tensor) -> Tensor:
    """[R, TOPK_PROBS] float32, descending, zero-padded, of ``logits`` [R, V]."""
    probs = floored(logits).softmax(dim=-1)
    top = probs.topk(min(TOPK_PROBS, probs.shape[1]), dim=-1).values
    return torch.nn.functional.pad(top, (0, TOPK_PROBS - top.shape[1]))


def hidden_state(hidden: Tensor | None) -> Tensor:
    """[R, H]; ValueError for a draft model that returns none."""
    if hidden is None:
        raise ValueError("this draft model returns no hidden state")
    return hidden


@dataclass(frozen=True, eq=False)
class MCSD:
    """Threshold on a decision model, for the whole batch or per request."""

    weights: ConfidenceNet | str
    beta: float = 0.4
    per_request: bool = False
    name: ClassVar[str] = "mcsd"
    needs: ClassVar[frozenset[str]] = frozenset({"topk_prob"})

    def __post_init__(self) -> None:
        """Load the weights where a file is given; reject a ``per_request`` that says neither."""
        require(
            isinstance(self.per_request, bool),
            f"policy {self.name}: per_request",
            "true or false",
            self.per_request,
        )
        if not isinstance(self.weights, ConfidenceNet):
            object.__setattr__(self, "weights", _network(self.weights))

    @property
    def batch_wide(self) -> bool:
        """Whether the outcome for a request depends on who shares its batch."""
        return not self.per_request

    def measure(self, logits: Tensor, _hidden: Tensor | None) -> dict[str, Tensor]:
        """Measure the input of the decision model beyond the entropy."""
        return {"topk_prob": topk_prob(logits)}

    def inputs(self, layer: DraftLayer) -> Tensor:
        """[B, F] float32."""
        return torch.cat((layer.measured["topk_prob"], layer.entropy[:, None]), dim=1)

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool: a living sequence of the batch, or the token's own, reaches beta."""
        assert isinstance(self.weights, ConfidenceNet)
        inputs = self.inputs(layer).float()
        likely = self.weights.to(inputs.device)(inputs).sigmoid() >= self.beta
        if self.per_request:
            return likely
        return (likely & layer.alive).any().expand_as(likely)


@dataclass(frozen=True, eq=False)
class MCSDHidden(MCSD):
    """The same rule on the draft's hidden state. Trained for one draft model only."""

    name: ClassVar[str] = "mcsd-hidden"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def measure(self, _logits: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """The hidden state that gave the distribution."""
        return {"hidden": hidden_state(hidden)}

    def inputs(self, layer: DraftLayer) -> Tensor:
        """[B, H]."""
        return layer.measured["hidden"]


@dataclass(frozen=True)
class MCSDInputs(Fixed):
    """Keeps every draft, and measures what both models read, so that it can be recorded.

    Without ``hidden`` only what :class:`MCSD` reads: a STANDALONE draft returns no hidden state.
    """

    hidden: bool = True
    name: ClassVar[str] = "mcsd-inputs"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Names of the columns that ``--c2t-record`` writes."""
        return frozenset({"topk_prob", "hidden"} if self.hidden else {"topk_prob"})

    def measure(self, logits: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """The inputs of both decision models."""
        measured = {"topk_prob": topk_prob(logits)}
        return measured | ({"hidden": hidden_state(hidden)} if self.hidden else {})


def train(recording: Recording) -> ConfidenceNet:
    """The decision model of :class:`MCSD`."""
    columns = _column(recording, "topk_prob"), recording.nodes["entropy"][:, None]
    return _train(recording, torch.cat(columns, dim=1), (48,), standardise=False)


def train_hidden(recording: Recording) -> ConfidenceNet:
    """The decision model of :class:`MCSDHidden`."""
    return _train(recording, _column(recording, "hidden"), (64, 32), standardise=True)


def _column(recording: Recording, name: str) -> Tensor:
    if name not in recording.nodes:
        raise ConfigError(f"this recording lacks {name}: record with eval.baselines:MCSDInputs")
    return recording.nodes[name].float()


def _train(
    recording: Recording, inputs: Tensor, sizes: Sequence[int], *, standardise: bool
) -> ConfidenceNet:
    settings, generator = TrainSettings(), torch.Generator().manual_seed(0)
    rows = training_rows(recording, generator)
    inputs, labels = inputs[rows], recording.nodes["accept"][rows].float()
    require_finite(inputs)
    torch.manual_seed(settings.seed)  # the network's initial weights
    net = ConfidenceNet(inputs.shape[1], sizes)
    mean, std = torch.zeros(inputs.shape[1]), torch.ones(inputs.shape[1])
    if standardise:
        mean, std = inputs.mean(dim=0), inputs.std(dim=0).clamp(min=1e-6)
    fit(net, (inputs - mean) / std, labels, settings, generator)
    net.absorb_scaling(mean, std)
    return net.requires_grad_(False)


def _network(path: Any) -> ConfidenceNet:
    """The decision model in a file."""
    found = load(path)
    layers = [found.get(f"hidden.{n}.weight") for n in range(sum("weight" in k for k in found) - 1)]
    if not layers or any(layer is None or layer.dim() != 2 for layer in layers):
        raise ConfigError(f"policy mcsd: {path} holds no decision model")
    sizes = [len(layer) for layer in layers if layer is not None]
    net = ConfidenceNet(found["hidden.0.weight"].shape[1], sizes)
    frozen(net, found)
    return net
